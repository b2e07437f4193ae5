"""The plain attention forms against float64 brute force."""

from __future__ import annotations

import pytest
import torch
from attention_cases import HEADS, brute_force, make_paged

from minivllm.ops.attention import attention, paged_decode


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 7), (3, 11), (13, 13), (0, 4)])
def test_attention(heads: int, kv_heads: int, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(queries, heads, 10)
    k, v = torch.randn(keys, kv_heads, 10), torch.randn(keys, kv_heads, 10)
    start = keys - queries
    out = attention(q, k, v, 0.3, start)
    assert out.shape == q.shape
    want = brute_force(q, k, v, 0.3, start)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


def test_a_chunk_equals_its_part_of_the_whole() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    whole = attention(q, k, v, 0.5, 0)
    for start, end in ((0, 1), (0, 4), (4, 9), (8, 9)):
        chunk = attention(q[start:end], k[:end], v[:end], 0.5, start)
        torch.testing.assert_close(chunk, whole[start:end], atol=1e-6, rtol=0)


def test_the_future_is_not_seen() -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    before = attention(q, k, v, 1.0, 0)
    k[3], v[3] = 1e4, -1e4
    torch.testing.assert_close(attention(q, k, v, 1.0, 0)[:3], before[:3], atol=0, rtol=0)


def test_large_scores_do_not_overflow() -> None:
    q, k = torch.full((1, 1, 4), 100.0), torch.full((3, 1, 4), 100.0)
    v = torch.arange(12.0).view(3, 1, 4)
    out = attention(q, k, v, 1.0, 2)
    torch.testing.assert_close(out[0, 0], v.mean(0)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_accumulate_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(300, 2, 16).to(dtype) for _ in range(3))
    out = attention(q[-1:], k, v, 0.25, 299)
    assert out.dtype == dtype
    exact = attention(q[-1:].float(), k.float(), v.float(), 0.25, 299)
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_paged_decode(heads: int, kv_heads: int, block_size: int) -> None:
    """Permuted tables, lengths at and around block bounds, pad rows, NaN in every unused slot."""
    lengths = [1, 0, block_size, block_size + 1, 2 * block_size, 13, 0]
    paged = make_paged(lengths, block_size, kv_heads, 10)
    q = torch.randn(len(lengths), heads, 10, generator=torch.Generator().manual_seed(1))
    out = paged_decode(q, paged.k_cache, paged.v_cache, paged.block_tables, paged.context_lens, 0.3)
    for row, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(out[row], torch.zeros(heads, 10))
            continue
        want = brute_force(q[row : row + 1], paged.keys[row], paged.values[row], 0.3, length - 1)
        torch.testing.assert_close(out[row].double(), want[0], atol=1e-5, rtol=0)


def test_pad_rows_alone() -> None:
    cache = torch.full((2, 4, 1, 8), torch.nan)
    tables = torch.full((3, 1), -1, dtype=torch.int32)
    q = torch.full((3, 2, 8), torch.nan)
    out = paged_decode(q, cache, cache, tables, torch.zeros(3, dtype=torch.int32), 1.0)
    assert torch.equal(out, torch.zeros(3, 2, 8))


def test_two_rows_may_share_blocks() -> None:
    paged = make_paged([8, 8], 4, 2, 8)
    tables = paged.block_tables.clone()
    tables[1] = tables[0]
    q = torch.randn(1, 4, 8).repeat(2, 1, 1)
    out = paged_decode(q, paged.k_cache, paged.v_cache, tables, paged.context_lens, 1.0)
    assert torch.equal(out[0], out[1])
