"""The record of an offline run: throughput against the machine's roofline, and where a step goes.

Owns what is measured around the run itself: the ceilings before a model takes the memory, and the
steps after the last repeat. Never loads a model. Lessons 13 and 15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.bench import measure, roofline, step_time
from minivllm.bench.limit import Machine, RunLimit, decode_limit, run_limit
from minivllm.bench.result import BenchResult
from minivllm.bench.workload import Workload
from minivllm.config import ModelConfig

if TYPE_CHECKING:
    from minivllm.llm import LLM

STEPS = (1, 100)  # decode steps whose device time is shown


def measure_ceilings(model: ModelConfig, device: str, dtype: str) -> roofline.Ceilings:
    """Both ceilings of the device and type that an engine with these options would take.

    To be called before the engine is built: on a GPU this reads 8 GiB.
    """
    import torch

    from minivllm.engine.device import pick_device, pick_dtype

    target = pick_device(device)
    found = roofline.ceilings(target, pick_dtype(dtype, model.dtype, target))
    if target.type == "cuda":
        torch.cuda.empty_cache()  # the engine is to find the card as it was
    return found


def machine_of(llm: LLM, ceilings: roofline.Ceilings) -> Machine:
    """The ceilings with the sizes of this engine's weights and cache."""
    runner: Any = llm.engine.runner
    tokens = runner.num_blocks * runner.block_size
    element_size = next(runner.model.parameters()).element_size()
    return Machine(ceilings, element_size, runner.kv_bytes // tokens)


def describe_graphs(llm: LLM) -> dict[str, float] | None:
    """What capturing cost; None for an engine without graphs."""
    graphs = getattr(llm.engine.runner, "graphs", None)
    if graphs is None:
        return None
    return {
        "count": graphs.count,
        "capture_seconds": graphs.seconds,
        "capture_bytes": graphs.num_bytes,
    }


def decode_steps(llm: LLM, workload: Workload, machine: Machine) -> dict[str, dict[str, float]]:
    """Step number -> its rows, the device's milliseconds and the roofline's; if it fits."""
    found = {}
    for step in STEPS:
        contexts = step_time.contexts_at(workload, step)[: llm.config.max_num_seqs]
        if not contexts or not step_time.fits(llm, contexts):
            continue
        found[str(step)] = {
            "rows": len(contexts),
            "context_tokens": sum(contexts),
            "device_ms": 1e3 * step_time.decode_seconds(llm, contexts),
            "limit_ms": 1e3 * decode_limit(llm.model_config, contexts, machine),
        }
    return found


def record(
    llm: LLM,
    workload: Workload,
    results: list[BenchResult],
    ceilings: roofline.Ceilings,
    start_seconds: dict[str, float],
) -> dict[str, Any]:
    """Everything about a measured run as plain data; measures single steps on the way."""
    machine = machine_of(llm, ceilings)
    best = measure.best_of(results)
    least: RunLimit = run_limit(llm.model_config, workload, machine)
    steady = step_time.steady_step(llm, workload)
    return {
        "environment": best.environment,
        "best": best.to_dict(),
        "output_tokens_per_s": [result.output_tokens_per_s for result in results],
        "roofline": {
            **ceilings.to_dict(),
            **least.to_dict(),
            "share": best.output_tokens_per_s / least.output_tokens_per_s,
        },
        "start_seconds": {**start_seconds, "total": sum(start_seconds.values())},
        "graphs": describe_graphs(llm),
        "decode_step": decode_steps(llm, workload, machine),
        "steady_step": None if steady is None else steady.to_dict(),
    }


def lines(record: dict[str, Any]) -> str:
    """The record's own part as text, below the table of repeats."""
    roof, start, graphs = record["roofline"], record["start_seconds"], record["graphs"]
    text = [
        f"roofline {roof['output_tokens_per_s']:,.0f} output tokens/s "
        f"({roof['bytes_per_s'] / 1e9:,.0f} GB/s, {roof['flops_per_s'] / 1e12:,.2f} TFLOP/s "
        f"{roof['dtype']}); reached {roof['share']:.1%}",
        "start " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in start.items()),
    ]
    if graphs is not None:
        text.append(
            f"graphs {graphs['count']} in {graphs['capture_seconds']:.1f} s, "
            f"{graphs['capture_bytes'] / 2**20:,.0f} MiB"
        )
    for step, found in record["decode_step"].items():
        text.append(
            f"decode step {step} ({found['rows']} rows, {found['context_tokens']:,} tokens): "
            f"{found['device_ms']:.2f} ms on the device, roofline {found['limit_ms']:.2f} ms"
        )
    steady = record["steady_step"]
    if steady is not None:
        line = f"steady step ({steady['rows']} rows): {steady['wall_ms']:.2f} ms"
        if steady["host_ms"] is not None:
            line += (
                f", of which the device {steady['device_ms']:.2f}, host not overlapped "
                f"{steady['host_ms']:.2f}"
            )
        text.append(line)
    return "\n".join(text)
