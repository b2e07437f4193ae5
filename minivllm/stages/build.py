"""Makes a stage by name: one interface over the generations of the engine.

Owns the choice of units (the package's, or a student's) and nothing of what they do. Lessons 01 on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minivllm.hub import resolve_model
from minivllm.ops.attention import attention
from minivllm.ops.norms import rms_norm
from minivllm.ops.rope import apply_rope, rope_table
from minivllm.stages.decoder import DecoderLayer, load_weights
from minivllm.stages.model import PlainModel
from minivllm.stages.s1_naive import generate_naive
from minivllm.stages.s2_kv import KVCache, generate_cached

NAMES = ("s1_naive", "s2_kv", "engine")
REFERENCE: dict[str, Any] = {
    "rms_norm": rms_norm,
    "rope_table": rope_table,
    "apply_rope": apply_rope,
    "attention": attention,
    "DecoderLayer": DecoderLayer,
    "load_weights": load_weights,
    "KVCache": KVCache,
    "generate_naive": generate_naive,
    "generate_cached": generate_cached,
}


class Stage:
    """A generation of the engine on a model.

    `generate(prompts, max_new, eos_ids)` takes lists of token ids and returns the greedy new ones.
    """

    def __init__(self, name: str, path: Path, max_len: int, units: Mapping[str, Any]) -> None:
        self.name = name
        self.units = SimpleNamespace(**{**REFERENCE, **units})
        self.max_len = max_len
        self.model = PlainModel(path, max_len, self.units)
        self.cache: KVCache | None = None
        if name == "s2_kv":
            c = self.model.config
            self.cache = self.units.KVCache(c.num_layers, max_len, c.num_kv_heads, c.head_dim)

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_new: int | Sequence[int],
        eos_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """New token ids of each prompt, one prompt after the other."""
        counts = [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
        run: Callable[..., list[int]] = self._cached if self.cache is not None else self._naive
        return [run(ids, count, eos_ids) for ids, count in zip(prompts, counts, strict=True)]

    @property
    def tokens_computed(self) -> int:
        """Tokens that have gone through the model."""
        return self.model.tokens_computed

    @property
    def kv_bytes(self) -> int:
        """Bytes of the tensors that hold keys and values."""
        if self.cache is None:
            return 0
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.cache.k, self.cache.v))

    def _naive(self, ids: list[int], count: int, eos_ids: Sequence[int]) -> list[int]:
        return self.units.generate_naive(self.model, ids, count, eos_ids)

    def _cached(self, ids: list[int], count: int, eos_ids: Sequence[int]) -> list[int]:
        return self.units.generate_cached(self.model, self.cache, ids, count, eos_ids)


class EngineStage:
    """The real engine behind the same interface."""

    name = "engine"

    def __init__(self, model: str, max_len: int, parts: Mapping[str, Any], **options: Any) -> None:
        from minivllm.llm import LLM

        self.llm = LLM(model, max_model_len=max_len, parts=dict(parts) or None, **options)

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_new: int | Sequence[int],
        eos_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """New token ids of each prompt, all prompts in one batch."""
        from minivllm.sampling_params import SamplingParams

        counts = [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
        params = [
            SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=list(eos_ids)
            )
            for count in counts
        ]
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    @property
    def tokens_computed(self) -> int:
        """Tokens that have gone through the model."""
        return self.llm.stats.tokens_computed

    @property
    def kv_bytes(self) -> int:
        """Bytes of the tensor that holds keys and values."""
        return self.llm.stats.kv_bytes


def build(
    name: str,
    model: str = "tiny",
    *,
    device: str = "auto",
    use: str = "reference",
    max_len: int = 512,
    **options: Any,
) -> Stage | EngineStage:
    """A stage on a model: "s1_naive", "s2_kv" or "engine".

    use: "reference", or "mine" for the solved units of the exercises folder, the reference's for
    the rest. The first stages run on the CPU. ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"stage {name!r} is unknown; one of {', '.join(NAMES)}")
    if use not in ("reference", "mine"):
        raise ValueError(f"use={use!r} is unknown; one of reference, mine")
    mine: Mapping[str, Any] = {}
    if use == "mine":
        from minivllm.course.stage_units import solved_units

        mine = solved_units()
    if name == "engine":
        from minivllm.ops.table import ENGINE_PARTS, UNITS

        parts = {key: unit for key, unit in mine.items() if key in (*UNITS, *ENGINE_PARTS)}
        return EngineStage(model, max_len, parts, device=device, **options)
    units = {key: unit for key, unit in mine.items() if key in REFERENCE}
    return Stage(name, resolve_model(model), max_len, units)
