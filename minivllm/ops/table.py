"""The one place where a form of each operation is chosen.

Owns the table `Ops`, the forms of each backend, and the entry of a user's own parts. Never computes
and never looks at the machine: `backends.py` says which backend runs where. A fused form names the
units it replaces: where a user gives one of them, the plain composition takes the fused form's
place, so that the given unit is really what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch

from minivllm.ops import (
    activations,
    attention,
    compiled,
    compose,
    cpu_forms,
    flash_attn,
    kv,
    kv_fp8,
    linear,
    norms,
    rope,
    sampling,
    sdpa,
)

UNITS: dict[str, Callable[..., Any]] = {
    "rms_norm": norms.rms_norm,
    "add_rms_norm": norms.add_rms_norm,
    "rope_table": rope.rope_table,
    "apply_rope": rope.apply_rope,
    "attention": attention.attention,
    "store_kv": kv.store_kv,
    "paged_decode": attention.paged_decode,
    "silu_mul": activations.silu_mul,
    "sample": sampling.sample,
}
KV_ENTRIES = ("qk_norm_rope_store", "prefill_attention", "decode_attention")  # touch the cache
ENGINE_PARTS = ("block_manager", "scheduler")


@dataclass(frozen=True, slots=True)
class Ops:
    """What the model and the runner call. Shapes stand with the functions themselves."""

    rope_table: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    pack_weight: Callable[[torch.Tensor], torch.Tensor]  # the weight as `linear` wants it
    qk_norm_rope_store: Callable[..., torch.Tensor]
    prefill_attention: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]
    sample: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Fused:
    """A faster form of a table entry and the units that its plain composition is made of."""

    entry: str
    function: Callable[..., Any]
    replaces: frozenset[str]


def _sdpa_forms() -> tuple[Fused, ...]:
    forms = [
        Fused("rms_norm", cpu_forms.rms_norm, frozenset({"rms_norm"})),
        Fused("add_rms_norm", cpu_forms.add_rms_norm, frozenset({"add_rms_norm"})),
        Fused(
            "qk_norm_rope_store",
            cpu_forms.qk_norm_rope_store,
            frozenset({"rms_norm", "apply_rope", "store_kv"}),
        ),
        Fused("prefill_attention", sdpa.prefill_attention, frozenset({"attention"})),
        Fused("decode_attention", sdpa.paged_decode, frozenset({"paged_decode"})),
    ]
    if linear.onednn_available():
        forms.append(Fused("linear", linear.packed_linear, frozenset()))
        forms.append(Fused("pack_weight", linear.onednn_pack_weight, frozenset()))
    return tuple(forms)


def _triton_forms() -> tuple[Fused, ...]:
    from minivllm.kernels.entries import TRITON_FUSED  # late: imports triton

    return TRITON_FUSED


def _flash_attn_forms() -> tuple[Fused, ...]:
    ours = (form for form in _triton_forms() if not form.entry.endswith("_attention"))
    return (
        *ours,
        Fused("prefill_attention", flash_attn.prefill_attention, frozenset({"attention"})),
        Fused("decode_attention", flash_attn.paged_decode, frozenset({"paged_decode"})),
    )


def _compiled_forms() -> tuple[Fused, ...]:
    return (
        Fused("rms_norm", compiled.rms_norm, frozenset({"rms_norm"})),
        Fused("add_rms_norm", compiled.add_rms_norm, frozenset({"add_rms_norm"})),
        Fused("silu_mul", compiled.silu_mul, frozenset({"silu_mul"})),
        Fused(
            "qk_norm_rope_store",
            compiled.qk_norm_rope_store,
            frozenset({"rms_norm", "apply_rope", "store_kv"}),
        ),
    )


# Name -> its fused forms, looked up when the backend is chosen.
BACKENDS: dict[str, Callable[[], tuple[Fused, ...]]] = {
    "torch": tuple,
    "sdpa": _sdpa_forms,
    "triton": _triton_forms,
    "flash_attn": _flash_attn_forms,
    "compile": _compiled_forms,
}
# Forms that a CUDA graph can record: they never wait for the device, and have fixed shapes.
CAPTURABLE = ("triton", "flash_attn")
CAPTURABLE_PREFILL = ("triton",)  # its grid follows the tokens, however few rows hold them


@dataclass(slots=True)
class Part:
    """A user's own part, and how often the engine has reached it."""

    name: str
    target: Callable[..., Any]
    calls: int = field(default=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.target(*args, **kwargs)


def wrap_parts(parts: Mapping[str, Callable[..., Any]] | None) -> dict[str, Part]:
    """Check the names of `LLM(parts=...)` and count the calls of each."""
    known = (*UNITS, *ENGINE_PARTS)
    for name, target in (parts or {}).items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            raise ValueError(f"parts has no entry {name!r}{hint}")
        if not callable(target):
            raise TypeError(f"parts[{name!r}] must be callable, got {type(target).__name__}")
    return {name: Part(name, target) for name, target in (parts or {}).items()}


def build_ops(
    backend: str, parts: Mapping[str, Callable[..., Any]], kv_cache_dtype: str = "auto"
) -> Ops:
    """Fill the table: the units, a user's parts over them, then the fused forms still allowed.

    With an 8-bit cache every form that touches it is the 8-bit one, and takes two more arguments,
    the scales; ValueError where a user's part stands in their place.
    """
    if kv_cache_dtype == "fp8":
        mine = sorted(parts.keys() & {"store_kv", "attention", "paged_decode"})
        if mine:
            raise ValueError(f"kv_cache_dtype='fp8' cannot run with your own {mine}")
    units = {**UNITS, **{name: part for name, part in parts.items() if name in UNITS}}
    entries: dict[str, Any] = {
        name: units[name]
        for name in ("rope_table", "rms_norm", "add_rms_norm", "silu_mul", "sample")
    }
    entries["linear"], entries["pack_weight"] = linear.linear, linear.pack_weight
    entries["qk_norm_rope_store"] = compose.compose_qk_norm_rope_store(
        units["rms_norm"], units["apply_rope"], units["store_kv"]
    )
    entries["prefill_attention"] = compose.compose_prefill_attention(units["attention"])
    entries["decode_attention"] = units["paged_decode"]
    reads_8_bit = backend == "triton"  # its kernels take the scales as optional arguments
    if kv_cache_dtype == "fp8":
        entries["qk_norm_rope_store"] = compose.compose_qk_norm_rope_store(
            units["rms_norm"], units["apply_rope"], kv_fp8.store_kv
        )
        entries["prefill_attention"] = kv_fp8.prefill_attention
        entries["decode_attention"] = kv_fp8.paged_decode
    for fused in BACKENDS[backend]():
        if fused.replaces & parts.keys():
            continue
        if kv_cache_dtype == "fp8" and fused.entry in KV_ENTRIES and not reads_8_bit:
            continue
        entries[fused.entry] = fused.function
    return Ops(**entries)
