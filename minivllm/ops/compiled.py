"""The plain torch forms under torch.compile, which fuses the passes of each into one kernel.

Owns which forms are compiled and what may vary between calls. Never has arithmetic of its own: what
is compiled are the units themselves. Attention and the KV store stay plain, for they loop over rows
or pick them by value, and a compiler sees nothing to fuse there; so does sampling, for torch 2.11
makes 32-bit numbers of the 64-bit products that random numbers are made of. Lesson 13.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minivllm.ops import activations, kv, norms, rope

CAPABILITY = (7, 0)  # the oldest that torch.compile makes Triton kernels for
COMPILERS = {"darwin": "clang++", "win32": "cl"}  # what torch calls, unless CXX names another


def obstacle(device: str, capability: tuple[int, int] | None) -> str | None:
    """Why torch.compile cannot run on such a device, or None."""
    if device == "cuda":
        if (capability or (0, 0)) < CAPABILITY:
            return f"needs compute capability {CAPABILITY} or higher; the GPU has {capability}"
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton, which is not installed"
        return None
    compiler = os.environ.get("CXX", COMPILERS.get(sys.platform, "g++"))
    if shutil.which(compiler) is None:
        return f"needs a C++ compiler: {compiler} is not on the PATH, and CXX may name another"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"needs Python's headers (python3-dev), and there is no {header}"
    return None


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Made at first use: importing the compiler alone takes seconds."""
    return torch.compile(function)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Says that the first size varies: one kernel for all numbers of tokens, and one for 1.

    dynamic=True would leave every size open, the head size too, and takes sizes that are equal in
    the first call for equal forever: 16 tokens and 16 heads, and the next prompt compiles again.
    """
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norms.rms_norm`. x: [..., H], weight: [H] -> [..., H]."""
    return _compiled(norms.rms_norm)(_tokens(x), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norms.add_rms_norm`. x, residual: [..., H] -> (normalised sum, sum)."""
    return _compiled(norms.add_rms_norm)(_tokens(x), _tokens(residual), weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `activations.silu_mul`. [T, 2 I] -> [T, I]."""
    return _compiled(activations.silu_mul)(_tokens(gate_up))


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `compose.compose_qk_norm_rope_store`. -> rotated q [T, Hq, D]."""
    tokens = (_tokens(q), _tokens(k), _tokens(positions))
    q, k = _compiled(_qk_norm_rope)(*tokens, q_weight, k_weight, eps, cos, sin)
    kv.store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def _qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [T, Hq, D], k: [T, Hkv, D] -> both normalised, where the model does that, and rotated."""
    if q_weight is not None and k_weight is not None:
        q = norms.rms_norm(q, q_weight, eps)
        k = norms.rms_norm(k, k_weight, eps)
    return rope.apply_rope(q, positions, cos, sin), rope.apply_rope(k, positions, cos, sin)
