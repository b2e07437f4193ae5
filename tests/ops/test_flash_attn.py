"""The calls into the flash_attn package, against a stand-in of the same argument names.

tests/gpu/test_flash_attn.py has the real kernels.
"""

from __future__ import annotations

import inspect
import sys

import fake_flash_attn
import pytest
import torch
from attention_cases import HEADS, Paged, make_paged

from minivllm.ops import compose, flash_attn
from minivllm.ops.attention import attention, paged_decode

plain_prefill = compose.compose_prefill_attention(attention)
DIM, BLOCK = 16, 256
# (context, queries): whole prompts, a later chunk, a hit of whole blocks, a last token.
CASES = {
    "one": [(9, 9)],
    "two blocks": [(300, 300)],
    "several": [(1, 1), (257, 257), (40, 40)],
    "chunks": [(256, 128), (300, 44), (12, 5)],
    "hits": [(258, 2), (513, 1), (512, 256)],
    "mixed": [(7, 7), (270, 14), (256, 1), (3, 3)],
}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn.module())


def queries(count: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, heads, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def paged_of(lengths: list[int], kv_heads: int, dtype: torch.dtype) -> Paged:
    return make_paged(lengths, BLOCK, kv_heads, DIM, dtype=dtype)


def test_signatures_agree() -> None:
    for form, plain in (
        (flash_attn.prefill_attention, plain_prefill),
        (flash_attn.paged_decode, paged_decode),
    ):
        assert list(inspect.signature(form).parameters) == list(inspect.signature(plain).parameters)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_prefill(case: str, dtype: torch.dtype) -> None:
    lengths, counts = zip(*CASES[case], strict=True)
    paged = paged_of(list(lengths), 2, dtype)
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    args = (queries(sum(counts), 4, dtype), paged.k_cache, paged.v_cache, paged.block_tables)
    rest = (paged.context_lens, bounds, max(counts), 0.3)
    close(flash_attn.prefill_attention(*args, *rest), plain_prefill(*args, *rest))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_with_pad_rows(heads: int, kv_heads: int) -> None:
    """Rows of no context have a table of -1 alone, and yield zeros."""
    lengths = [1, 0, 255, 256, 257, 0, 600]
    paged = paged_of(lengths, kv_heads, torch.bfloat16)
    assert (paged.block_tables[1] == -1).all()
    q = queries(len(lengths), heads, torch.bfloat16)
    args = (q, paged.k_cache, paged.v_cache, paged.block_tables, paged.context_lens, 0.3)
    got = flash_attn.paged_decode(*args)
    close(got, paged_decode(*args))
    assert not got[[1, 5]].any()


def test_all_rows_are_pads() -> None:
    """What a graph is captured on."""
    paged = paged_of([0, 0], 2, torch.float16)
    q = queries(2, 4, torch.float16)
    got = flash_attn.paged_decode(
        q, paged.k_cache, paged.v_cache, paged.block_tables, paged.context_lens, 0.3
    )
    assert torch.equal(got, torch.zeros_like(q))
