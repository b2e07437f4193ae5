"""The CPU's norms and q/k path against the plain units."""

from __future__ import annotations

import pytest
import torch

from minivllm.ops import compose, cpu_forms, kv, norms, rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 576), (5, 33), (2, 3, 16)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tiny and huge rows too: they show eps and float32 statistics."""
    g = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-4, 1.0, 200.0]).view(3, *[1] * len(shape))
    x = torch.randn(3, *shape, generator=g) * scales
    x, residual = x.to(dtype), torch.randn(x.shape, generator=g).to(dtype)
    weight = (torch.rand(shape[-1], generator=g) + 0.5).to(dtype)
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    )
    got, want = (f.rms_norm(x, weight, 1e-5) for f in (cpu_forms, norms))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, **tolerance)
    for a, b in zip(
        cpu_forms.add_rms_norm(x, residual, weight, 1e-5),
        norms.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_qk_norm_rope_store(heads: int, kv_heads: int, normed: bool) -> None:
    """Rotated q is returned; k and v are at their slots, and no other slot is touched."""
    plain = compose.compose_qk_norm_rope_store(norms.rms_norm, rope.apply_rope, kv.store_kv)
    g = torch.Generator().manual_seed(0)
    packed = torch.randn(6, heads + 2 * kv_heads, 16, generator=g)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)  # views, as in the model
    weights = [torch.rand(16, generator=g) + 0.5 for _ in "qk"] if normed else [None, None]
    cos, sin = rope.rope_table(16, 64, 10000.0)
    positions = torch.tensor([0, 63, 5, 6, 7, 30])
    slots = torch.tensor([11, 3, 0, 7, 8, 4])
    found = []
    for form in (cpu_forms.qk_norm_rope_store, plain):
        caches = [torch.full((4, 3, kv_heads, 16), torch.nan) for _ in "kv"]
        found.append((form(q, k, v, *weights, 1e-6, positions, cos, sin, *caches, slots), *caches))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0, equal_nan=True)
    assert found[0][1].isnan().flatten(0, 1)[[1, 2, 5, 6, 9, 10]].all()
