"""How the engine is to run: every option of `LLM(...)`, checked before anything is loaded.

Owns names, defaults (vLLM's) and limits of the engine options, and the arithmetic between them.
Never imports torch and never looks at the machine; what the hardware allows is decided by the
runner. Lesson 10.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from minivllm.config import DTYPES, ModelConfig

logger = logging.getLogger(__name__)

# Tokens of the only blocks that flash-attn 2 reads (and multiples of them).
FLASH_ATTN_BLOCK = 256
MOST_SEQS = 65535  # rows of a launch: a GPU's grid has no more along its second and third axes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `LLM(model, ...)`. Zero or None means: decided from the model or the machine."""

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kvcache_block_size: int = 16
    num_kvcache_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    dtype: str = "auto"
    seed: int = 0
    device: str = "auto"
    load_format: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    parts: Mapping[str, Callable[..., Any]] | None = None

    @staticmethod
    def from_options(options: Mapping[str, Any]) -> EngineConfig:
        """Build from keyword arguments; an unknown one is a TypeError with a hint (case K10).

        The default of kvcache_block_size depends on attention_backend: 256 for "flash_attn".
        """
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise TypeError(f"LLM() has no option {name!r}{hint}")
        if options.get("attention_backend") == "flash_attn":
            # Here, where it is still known whether a size was given: that one is never replaced.
            options = {"kvcache_block_size": FLASH_ATTN_BLOCK, **options}
        return EngineConfig(**options)

    def __post_init__(self) -> None:
        for name in (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kvcache_block_size",
            "num_kvcache_blocks", "tensor_parallel_size",
        ):  # fmt: skip
            _check_count(name, getattr(self, name))
        if self.max_num_seqs > MOST_SEQS:
            raise ValueError(f"max_num_seqs={self.max_num_seqs} must be at most {MOST_SEQS}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer, got {self.seed!r}")
        for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.gpu_memory_utilization, (int, float)):
            raise TypeError(
                f"gpu_memory_utilization must be a number, got {self.gpu_memory_utilization!r}"
            )
        if self.parts is not None and not isinstance(self.parts, Mapping):
            raise TypeError(f"parts must be a dict of name to callable, got {self.parts!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not built yet; only 1"
            )
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8"))

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """Fill what depends on the model and check what must fit together."""
        max_model_len = self.max_model_len or model.max_position
        if max_model_len > model.max_position:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds the model's "
                f"max_position_embeddings={model.max_position}"
            )
        if model.sliding_window is not None and max_model_len > model.sliding_window:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds the model's sliding window of "
                f"{model.sliding_window} tokens, and windowed attention is not supported; "
                f"set max_model_len={model.sliding_window} or less"
            )
        budget = self.max_num_batched_tokens or max(
            8192, 0 if self.enable_chunked_prefill else max_model_len
        )
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={budget} is below max_model_len={max_model_len}: with "
                "enable_chunked_prefill=False a prompt must fit in one step"
            )
        # A step has at least one token for every running sequence: none is left undecoded.
        max_num_seqs = min(self.max_num_seqs, budget)
        if max_num_seqs < self.max_num_seqs:
            logger.warning(
                "max_num_seqs lowered from %d to max_num_batched_tokens=%d",
                self.max_num_seqs,
                budget,
            )
        return dataclasses.replace(
            self,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
        )


def _check_count(name: str, value: object) -> None:
    if value is None and name in ("max_model_len", "max_num_batched_tokens", "num_kvcache_blocks"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; one of {', '.join(choices)}")
