"""Rotary tables for every supported scaling of the frequencies.

Owns the formulas of `rope_scaling` in config.json: linear, llama3 and yarn. Never rotates: that is
`ops/rope.py`. Lesson 03.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minivllm.rope_config import RopeConfig


def build_rope_table(
    rope: RopeConfig,
    head_dim: int,
    max_position: int,
    rope_table: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [P, D/2] float32, for positions 0..max_position-1.

    The unscaled table is the unit `rope_table`; a scaled one changes the inverse frequencies first.
    """
    if rope.rope_type == "default":
        return rope_table(head_dim, max_position, rope.theta)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / rope.theta**exponent  # [D/2]
    scale = 1.0
    if rope.rope_type == "linear":
        inverse = inverse / rope.scaling["factor"]
    elif rope.rope_type == "llama3":
        inverse = _llama3(inverse, rope)
    else:
        inverse, scale = _yarn(inverse, rope, head_dim)
    angle = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse)
    return angle.cos() * scale, angle.sin() * scale


def _llama3(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: slow pairs are stretched by the factor, fast ones kept, a ramp between them."""
    s = rope.scaling
    original = s["original_max_position_embeddings"]
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = original * inverse / (2 * math.pi)  # full turns over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / s["factor"]


def _yarn(inverse: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023, sections 3.2 and 3.4): a ramp over dimensions, and a temperature."""
    s = rope.scaling
    factor = s["factor"]
    original = s["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32) - low
    stretch = (ramp / max(high - low, 0.001)).clamp(0, 1)
    mixed = (1 - stretch) * inverse + stretch * inverse / factor
    return mixed, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    s = rope.scaling
    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0

    if s.get("mscale") and s.get("mscale_all_dim"):
        return mscale(s["mscale"]) / mscale(s["mscale_all_dim"])
    return mscale(1.0)
