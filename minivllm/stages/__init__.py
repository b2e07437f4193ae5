"""Earlier generations of the engine, small and complete, each with the same `generate`.

s1_naive recomputes everything for every token; s2_kv keeps keys and values in a contiguous cache;
"engine" is the real one. `build` makes any of them on the same model, with the reference's units or
a student's own. Lessons 01, 05 and 06.
"""

from __future__ import annotations

from minivllm.stages.build import NAMES, Stage, build

__all__ = ["NAMES", "Stage", "build"]
