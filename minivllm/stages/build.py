"""Makes a stage by name: one interface over the generations of the engine.

Owns the choice of units (the package's, or a student's) and nothing of what they do. Lessons 01 on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.bench.live import storage_bytes
from minivllm.config import ModelConfig
from minivllm.engine.device import pick_device, pick_dtype
from minivllm.hub import resolve_model
from minivllm.ops.attention import attention
from minivllm.ops.norms import rms_norm
from minivllm.ops.rope import apply_rope, rope_table
from minivllm.ops.sampling import draw, token_probs
from minivllm.stages.decoder import DecoderLayer, load_weights
from minivllm.stages.model import PlainModel
from minivllm.stages.s1_naive import SampledModel, generate_naive
from minivllm.stages.s2_kv import KVCache, generate_cached

NAMES = ("s1_naive", "s2_kv", "engine")
COMMON = (
    *("token_probs", "draw", "rms_norm", "rope_table", "apply_rope", "attention"),
    *("DecoderLayer", "load_weights"),
)
REFERENCE: dict[str, Any] = {
    "token_probs": token_probs,
    "draw": draw,
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
# Stage -> the units that it runs on; the engine takes whatever `LLM(parts=...)` knows.
USED = {
    "s1_naive": (*COMMON, "generate_naive"),
    "s2_kv": (*COMMON, "KVCache", "generate_cached"),
}


class Stage:
    """A generation of the engine on a model; prompts one after the other.

    model, device, dtype: as in `LLM`. mine: units of a student's that take the reference's place.
    """

    def __init__(
        self,
        name: str,
        model: str | Path,
        max_len: int = 512,
        mine: Mapping[str, Any] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
    ) -> None:
        self.name = name
        self.model_name = str(model)
        self.mine = tuple(mine or ())
        self.units = SimpleNamespace(**{**REFERENCE, **(mine or {})})
        self.max_len = max_len
        path = resolve_model(model)
        place = pick_device(device)
        kind = pick_dtype(dtype, ModelConfig.from_dir(path).dtype, place)
        self.model = PlainModel(path, max_len, self.units, place, kind, load_format)
        self.cache = self.model.new_cache(max_len) if name == "s2_kv" else None

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_new: int | Sequence[int],
        eos_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """New token ids of each prompt (token ids), at most `max_new`, the ending one included."""
        return self._run(self.model, prompts, max_new, eos_ids)

    def sample(
        self,
        prompts: Sequence[list[int]],
        max_new: int | Sequence[int],
        eos_ids: Sequence[int] = (),
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """The same with each token drawn at random; equal seeds give equal texts."""
        units = self.units.token_probs, self.units.draw
        model = SampledModel(self.model, *units, temperature, top_k, top_p, seed)
        return self._run(model, prompts, max_new, eos_ids)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size

    @property
    def tokens_computed(self) -> int:
        """Tokens that have gone through the model."""
        return self.model.tokens_computed

    @property
    def kv_bytes(self) -> int:
        """Bytes of the tensors that are kept for keys and values: what is reserved."""
        return storage_bytes(self._kv_views())

    @property
    def kv_bytes_used(self) -> int:
        """Bytes of the keys and values that are stored now."""
        return sum(view.numel() * view.element_size() for view in self._kv_views())

    def _kv_views(self) -> list[torch.Tensor]:
        if self.cache is None:
            return []
        return [view for i in range(len(self.cache.lengths)) for view in self.cache.view(i)]

    def _run(
        self,
        model: Callable[..., torch.Tensor],
        prompts: Sequence[list[int]],
        max_new: int | Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[int]]:
        loop: Callable[..., list[int]] = self.units.generate_naive
        kept: tuple[KVCache, ...] = ()
        if self.cache is not None:
            loop, kept = self.units.generate_cached, (self.cache,)
        pairs = zip(prompts, _counts(prompts, max_new), strict=True)
        return [loop(model, *kept, ids, count, eos_ids) for ids, count in pairs]


class EngineStage:
    """The real engine behind the same interface; `llm` is the engine itself."""

    name = "engine"

    def __init__(
        self, model: str, max_len: int = 512, mine: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        from minivllm.llm import LLM

        self.model_name = model
        self.mine = tuple(mine or ())
        self.max_len = max_len
        parts = {**(options.pop("parts", None) or {}), **(mine or {})}
        self.llm = LLM(model, max_model_len=max_len, parts=parts or None, **options)

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_new: int | Sequence[int],
        eos_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """New token ids of each prompt (token ids), all prompts in one batch, greedy."""
        from minivllm.sampling_params import SamplingParams

        params = [
            SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=list(eos_ids)
            )
            for count in _counts(prompts, max_new)
        ]
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.llm.model_config.vocab_size

    @property
    def tokens_computed(self) -> int:
        """Tokens that have gone through the model."""
        return self.llm.stats.tokens_computed

    @property
    def kv_bytes(self) -> int:
        """Bytes of the tensor that holds keys and values: what is reserved."""
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

    use: "reference", or "mine" for the units of the exercises folder that pass their tests, the
    reference's for the rest; a printed line says which are which. max_len: the longest sequence,
    prompt and new tokens. options: dtype and load_format, for the engine all of `LLM`'s.
    ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"stage {name!r} is unknown; one of {', '.join(NAMES)}")
    if use not in ("reference", "mine"):
        raise ValueError(f"use={use!r} is unknown; one of reference, mine")
    mine = _my_units(name) if use == "mine" else {}
    if name == "engine":
        return EngineStage(model, max_len, mine, device=device, **options)
    return Stage(name, model, max_len, mine, device, **options)


def _my_units(name: str) -> dict[str, Any]:
    """The student's solved units that this stage runs on. Says which they are."""
    from minivllm.course.stage_units import solved_units
    from minivllm.ops.table import ENGINE_PARTS, UNITS

    used = USED.get(name, (*UNITS, *ENGINE_PARTS))
    mine = {key: unit for key, unit in solved_units().items() if key in used}
    if not mine:
        print(f"{name}: no unit of yours passes its tests yet, so all of it is the reference's")
    else:
        rest = "" if len(mine) == len(used) else "; the rest is the reference's"
        print(f"{name} runs on your {', '.join(mine)}{rest}")
    return mine


def _counts(prompts: Sequence[list[int]], max_new: int | Sequence[int]) -> list[int]:
    return [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
