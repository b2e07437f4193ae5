"""The roofline of a whole run: its least seconds if nothing but the machine counted.

Owns the formula, and no measuring: the two ceilings come from `roofline.ceilings`. A decode step
takes max(bytes / bandwidth, flops / rate); its bytes are the weights, once, and the keys and values
of all contexts. Prefill takes flops / rate. Lessons 13 and 15.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.bench.roofline import Ceilings, parameters
from minivllm.bench.workload import Workload
from minivllm.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """The ceilings, and the sizes that decide how many bytes a step reads."""

    ceilings: Ceilings
    element_size: int  # bytes of a weight
    kv_token_bytes: int  # bytes that one token keeps in the cache, over all layers


@dataclass(frozen=True, slots=True)
class RunLimit:
    """The least seconds of a run, and what that makes of its tokens."""

    decode_seconds: float
    prefill_seconds: float
    output_tokens_per_s: float

    def to_dict(self) -> dict[str, float]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def decode_limit(config: ModelConfig, contexts: Sequence[int], machine: Machine) -> float:
    """Least seconds of a decode step. contexts: tokens of each row, the new one included."""
    return _step(config, len(contexts), sum(contexts), machine)


def prefill_limit(config: ModelConfig, lengths: Sequence[int], machine: Machine) -> float:
    """Least seconds of computing whole prompts of these lengths, each with one token sampled."""
    parts = parameters(config)
    flops = 2 * sum(lengths) * (parts["attention"] + parts["MLP"])
    flops += 2 * len(lengths) * config.vocab_size * config.hidden_size
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    flops += 4 * config.num_layers * config.q_size * pairs  # scores, and their use: 2 each
    return flops / machine.ceilings.flops_per_s


def run_limit(config: ModelConfig, workload: Workload, machine: Machine) -> RunLimit:
    """The limit of a workload. A request's first token comes with its prompt, the rest by steps."""
    prompts = [len(prompt) for prompt in workload.prompts]
    decode = 0.0
    for step in range(1, max(workload.output_lens)):
        pairs = zip(prompts, workload.output_lens, strict=True)
        contexts = [prompt + step for prompt, length in pairs if length > step]
        decode += decode_limit(config, contexts, machine)
    prefill = prefill_limit(config, prompts, machine)
    return RunLimit(decode, prefill, workload.num_output_tokens / (decode + prefill))


def _step(config: ModelConfig, rows: int, context_tokens: int, machine: Machine) -> float:
    parts = parameters(config)
    products, table = parts["attention"] + parts["MLP"], config.vocab_size * config.hidden_size
    weights = (products + parts["norms"] + table) * machine.element_size
    flops = 2 * rows * (products + table) + 4 * config.num_layers * config.q_size * context_tokens
    size = weights + machine.kv_token_bytes * context_tokens
    return max(size / machine.ceilings.bytes_per_s, flops / machine.ceilings.flops_per_s)
