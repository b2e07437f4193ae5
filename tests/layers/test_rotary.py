"""Scaled rotary tables against transformers' own formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minivllm.layers.rotary import build_rope_table
from minivllm.ops.rope import rope_table
from minivllm.rope_config import RopeConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 1.0},
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {  # the published numbers of Llama 3.2
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "attention_factor": 1.3},
    {**YARN, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    {**YARN, "mscale": 0.7},
    {**YARN, "original_max_position_embeddings": 32768},
]


def config_of(scaling: dict[str, Any], theta: float, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": theta, **scaling},
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_tables_equal_transformers(scaling: dict[str, Any], theta: float, head_dim: int) -> None:
    config = config_of(scaling, theta, head_dim)
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = RopeConfig.from_dict({"rope_theta": theta, "rope_scaling": scaling})
    cos, sin = build_rope_table(rope, head_dim, 512, rope_table)
    assert cos.shape == sin.shape == (512, head_dim // 2) and cos.dtype == torch.float32
    angle = torch.arange(512).double()[:, None] * inverse.double()
    # The frequencies agree to a rounding of float32; at position 511 that is 6e-5 of an angle.
    torch.testing.assert_close(cos.double(), angle.cos() * factor, atol=2e-4, rtol=0)
    torch.testing.assert_close(sin.double(), angle.sin() * factor, atol=2e-4, rtol=0)
    torch.testing.assert_close(
        torch.atan2(sin[1], cos[1]).double(), inverse.double(), atol=1e-6, rtol=1e-5
    )


def test_default_is_the_unit() -> None:
    """The unscaled table is the one that students write: it must be called, with its numbers."""
    calls = []

    def unit(*args):
        calls.append(args)
        return rope_table(*args)

    rope = RopeConfig.from_dict({"rope_theta": 5000.0})
    cos, sin = build_rope_table(rope, 8, 20, unit)
    assert calls == [(8, 20, 5000.0)]
    assert torch.equal(cos, rope_table(8, 20, 5000.0)[0])
    assert torch.equal(sin, rope_table(8, 20, 5000.0)[1])


def test_scaling_changes_something() -> None:
    plain = rope_table(64, 200, 10000.0)[0]
    for scaling in SCALINGS:
        rope = RopeConfig.from_dict({"rope_theta": 10000.0, "rope_scaling": scaling})
        table = build_rope_table(rope, 64, 200, rope_table)[0]
        changed = not torch.allclose(table, plain, atol=1e-3)
        assert changed == (scaling["factor"] != 1.0), scaling
