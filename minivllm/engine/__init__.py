"""The engine: a scheduler half without torch, a runner half with it, and the loop between them.

sequence, block_manager, prefix_cache, scheduler and step_plan import no torch and know no runner;
the runner knows no scheduler. They meet in a `StepPlan`.
"""
