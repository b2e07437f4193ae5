"""The CPU forms against the plain ones: same signatures, same numbers."""

from __future__ import annotations

import inspect

import pytest
import torch
from attention_cases import HEADS, brute_force, make_paged

from minivllm.ops import compose, sdpa
from minivllm.ops.attention import attention, paged_decode

plain_prefill = compose.compose_prefill_attention(attention)
FORMS = {"torch": plain_prefill, "sdpa": sdpa.prefill_attention}


def test_signatures_agree() -> None:
    def names(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(sdpa.prefill_attention) == names(plain_prefill)
    assert names(sdpa.paged_decode) == names(paged_decode)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_paged_decode(heads: int, kv_heads: int, block_size: int, permuted: bool) -> None:
    lengths = [1, 0, block_size, block_size + 1, 37, 0, 2]
    paged = make_paged(lengths, block_size, kv_heads, 12, permuted=permuted)
    q = torch.randn(len(lengths), heads, 12, generator=torch.Generator().manual_seed(1))
    args = (q, paged.k_cache, paged.v_cache, paged.block_tables, paged.context_lens, 0.4)
    kept = q.clone()
    fast = sdpa.paged_decode(*args)
    torch.testing.assert_close(fast, paged_decode(*args), atol=1e-5, rtol=0)
    assert torch.equal(fast[1], torch.zeros(heads, 12))  # a pad row
    assert torch.equal(q, kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_prefill(form: str, heads: int, kv_heads: int, block_size: int, permuted: bool) -> None:
    """Whole prompts, chunks, single tokens and hits, packed without padding between them."""
    lengths, queries = [1, 7, 7, 16, 12, 33], [1, 7, 3, 16, 1, 20]
    paged = make_paged(lengths, block_size, kv_heads, 8, permuted=permuted)
    q = torch.randn(sum(queries), heads, 8, generator=torch.Generator().manual_seed(2))
    bounds = [0]
    for count in queries:
        bounds.append(bounds[-1] + count)
    out = FORMS[form](
        q,
        paged.k_cache,
        paged.v_cache,
        paged.block_tables,
        paged.context_lens,
        torch.tensor(bounds, dtype=torch.int32),
        max(queries),
        0.4,
    )
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        rows = slice(bounds[row], bounds[row + 1])
        want = brute_force(q[rows], paged.keys[row], paged.values[row], 0.4, length - count)
        torch.testing.assert_close(out[rows].double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_agree(dtype: torch.dtype) -> None:
    paged = make_paged([30, 5], 4, 2, 16, dtype=dtype)
    q = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    args = (q, paged.k_cache, paged.v_cache, paged.block_tables, paged.context_lens, 0.25)
    fast, slow = sdpa.paged_decode(*args), paged_decode(*args)
    assert fast.dtype == dtype
    torch.testing.assert_close(fast.float(), slow.float(), atol=3e-2, rtol=3e-2)
