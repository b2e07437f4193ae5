"""The fused norm, rotation and store against its composition from the torch forms."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES, close, close_8_bit

from minivllm.ops import compose, kv, kv_fp8, norms, rope


def run(device, dtype, dim, heads, kv_heads, norm, fp8=False):
    from minivllm.kernels.qkv import qk_norm_rope_store

    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    packed = torch.randn(4, sum(sizes), dtype=dtype, device=device)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in packed.split(sizes, -1))
    weights = [torch.randn(dim, dtype=dtype, device=device) if norm else None for _ in "qk"]
    table = [part.to(device) for part in rope.rope_table(dim, 64, 1e4)]
    positions = torch.tensor([0, 63, 7, 7], device=device)
    slots = torch.tensor([17, 3, -1, 0], device=device)
    results = []
    store = kv_fp8.store_kv if fp8 else kv.store_kv
    composed = compose.compose_qk_norm_rope_store(
        norms.rms_norm, rope.apply_rope, lambda *args: store(*args, *scales)
    )
    for function in (qk_norm_rope_store, composed):
        cache_type = torch.float8_e4m3fn if fp8 else dtype
        k_cache = torch.zeros(2, 16, kv_heads, dim, dtype=cache_type, device=device)
        v_cache = torch.zeros_like(k_cache)
        scales = list(torch.zeros(2, 2, 16, kv_heads, device=device)) if fp8 else []
        extra = scales if function is qk_norm_rope_store else []
        out = function(q, k, v, *weights, 1e-6, positions, *table, k_cache, v_cache, slots, *extra)
        results.append((out, k_cache, v_cache, *scales))
    return results


def check(device, dtype, dim, heads, kv_heads, norm):
    got, expected = run(device, dtype, dim, heads, kv_heads, norm)
    for a, b in zip(got, expected):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "norm"),
    [(16, 6, 2, True), (32, 2, 2, False), (80, 2, 1, True)],
)
def test_equals_the_composition(device, poisoned, dtype, dim, heads, kv_heads, norm):
    check(device, dtype, dim, heads, kv_heads, norm)


def test_8_bit_cache(device, poisoned):
    got, expected = run(device, torch.float32, 32, 6, 2, True, fp8=True)
    close(got[0], expected[0], torch.float32)
    for cache, scale in ((1, 3), (2, 4)):
        torch.testing.assert_close(got[scale], expected[scale], rtol=1e-5, atol=1e-7)
        close_8_bit(got[cache], expected[cache])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "norm"), [(16, 8, True), (9, 3, False), (4, 4, True), (32, 4, False)]
)
def test_shapes_of_models(gpu, dtype, dim, heads, kv_heads, norm):
    check(gpu, dtype, dim, heads, kv_heads, norm)
