"""The 8-bit cache's torch forms."""

from __future__ import annotations

import torch

from minivllm.ops import attention, compose, kv_fp8


def test_rounding_error_is_that_of_three_mantissa_bits():
    x = torch.randn(50, 2, 64) * torch.logspace(-3, 3, 50)[:, None, None]
    numbers, scale = kv_fp8.quantize(x)
    assert numbers.dtype == torch.float8_e4m3fn and scale.shape == (50, 2)
    error = (kv_fp8.dequantize(numbers, scale) - x).abs()
    # Half a step: 2^-4 of the number, or of the least normal number times the scale.
    assert (error <= x.abs() * 2**-4 * 1.001 + scale[..., None] * 2**-10).all()


def test_zeros_stay_zeros():
    numbers, scale = kv_fp8.quantize(torch.zeros(3, 2, 16))
    assert (scale == 1).all() and (numbers.float() == 0).all()


def test_forms_equal_the_plain_ones_over_the_dequantised_cache():
    k_cache = torch.zeros(4, 16, 2, 16, dtype=torch.float8_e4m3fn)
    v_cache, scales = torch.zeros_like(k_cache), torch.zeros(2, 4, 16, 2)
    k, v = torch.randn(2, 40, 2, 16)
    slots = torch.randperm(64)[:40]
    slots[5] = -1
    kv_fp8.store_kv(k, v, k_cache, v_cache, slots, *scales)
    plain = [kv_fp8.dequantize(c, s) for c, s in zip((k_cache, v_cache), scales)]
    tables = torch.tensor([[2, 0, -1], [3, 1, -1]], dtype=torch.int32)
    lens = torch.tensor([20, 32], dtype=torch.int32)
    q = torch.randn(2, 4, 16)
    got = kv_fp8.paged_decode(q, k_cache, v_cache, tables, lens, 0.25, *scales)
    assert torch.equal(got, attention.paged_decode(q, *plain, tables, lens, 0.25))
    bounds = torch.tensor([0, 20, 23], dtype=torch.int32)
    q = torch.randn(23, 4, 16)
    got = kv_fp8.prefill_attention(q, k_cache, v_cache, tables, lens, bounds, 20, 0.25, *scales)
    prefill = compose.compose_prefill_attention(attention.attention)
    assert torch.equal(got, prefill(q, *plain, tables, lens, bounds, 20, 0.25))
