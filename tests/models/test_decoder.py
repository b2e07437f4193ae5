"""The decoder as a function: one forward pass against transformers, and its rows' independence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm.config import ModelConfig
from minivllm.models.decoder import CausalLM
from minivllm.models.loader import load_model
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.kv import slot_mapping
from minivllm.ops.table import build_ops
from tiny_models import FAMILIES, VOCAB_SIZE, Reference

SIZE = 4  # tokens per block
Make = Callable[..., Path]
Refer = Callable[[Path], Reference]


def load(path: Path, backend: str = "torch", dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(
        path,
        ModelConfig.from_dir(path),
        build_ops(backend, {}),
        max_position=64,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def empty_cache(model: CausalLM, blocks: int) -> torch.Tensor:
    """NaN where nothing is stored: whatever reads too far shows."""
    config = model.config
    shape = (config.num_layers, 2, blocks, SIZE, config.num_kv_heads, config.head_dim)
    return torch.full(shape, torch.nan, dtype=model.model.norm.weight.dtype)


def batch_of(rows: list[tuple[list[int], int, int]], num_decode: int) -> AttentionBatch:
    """rows: (block table, start, end), decode rows first."""
    width = max(len(table) for table, _, _ in rows)
    counts = [end - start for _, start, end in rows[num_decode:]]
    return AttentionBatch(
        positions=torch.tensor([p for _, start, end in rows for p in range(start, end)]),
        slot_mapping=torch.tensor(
            [slot for table, *bounds in rows for slot in slot_mapping(table, *bounds, SIZE)]
        ),
        block_tables=torch.tensor(
            [table + [-1] * (width - len(table)) for table, _, _ in rows], dtype=torch.int32
        ),
        context_lens=torch.tensor([end for _, _, end in rows], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        max_seqlen_q=max(counts, default=0),
        num_decode=num_decode,
    )


@torch.inference_mode()
def run(
    model: CausalLM, cache: torch.Tensor, ids: list[int], batch: AttentionBatch
) -> torch.Tensor:
    return model.logits(model(torch.tensor(ids), batch, cache))


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_whole_prompt(name: str, backend: str, tiny_model: Make, reference: Refer) -> None:
    path = tiny_model(name, initializer_range=0.2)
    model = load(path, backend)
    ids = torch.randint(VOCAB_SIZE, (11,)).tolist()
    logits = run(model, empty_cache(model, 5), ids, batch_of([([3, 0, 4], 0, 11)], 0))
    torch.testing.assert_close(logits, reference(path).logits(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rows_of_a_mixed_step(name: str, backend: str, tiny_model: Make, reference: Refer) -> None:
    """Two decode rows, a first chunk, a later chunk and a single token, in one pass."""
    path = tiny_model(name, initializer_range=0.2)
    model, refer = load(path, backend), reference(path)
    texts = [torch.randint(VOCAB_SIZE, (n,)).tolist() for n in (6, 9, 7, 10, 1)]
    tables = [[1, 12], [5, 3, 8], [2, 9], [0, 7, 4], [6]]
    starts = [5, 8, 0, 4, 0]
    cache = empty_cache(model, 13)
    for text, table, start in zip(texts, tables, starts, strict=True):
        if start:
            run(model, cache, text[:start], batch_of([(table, 0, start)], 0))
    rows = [(t, s, len(text)) for t, s, text in zip(tables, starts, texts, strict=True)]
    ids = [token for text, start in zip(texts, starts, strict=True) for token in text[start:]]
    logits = run(model, cache, ids, batch_of(rows, 2))
    at = 0
    for text, start in zip(texts, starts, strict=True):
        count = len(text) - start
        want = refer.logits(text)[start:]
        torch.testing.assert_close(logits[at : at + count], want, atol=1e-4, rtol=0)
        at += count


def test_pad_rows_change_nothing(tiny_model: Make) -> None:
    """Rows of context length 0 and slot -1, as a captured graph has: no store, no NaN."""
    model = load(tiny_model("qwen3"))
    ids = torch.randint(VOCAB_SIZE, (6,)).tolist()
    cache = empty_cache(model, 4)
    run(model, cache, ids[:5], batch_of([([2, 1], 0, 5)], 0))
    row = batch_of([([2, 1], 5, 6)], 1)
    padded = AttentionBatch(
        positions=torch.tensor([5, 0, 0]),
        slot_mapping=torch.tensor([int(row.slot_mapping), -1, -1]),
        block_tables=torch.tensor([[2, 1], [-1, -1], [0, 0]], dtype=torch.int32),
        context_lens=torch.tensor([6, 0, 0], dtype=torch.int32),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        max_seqlen_q=0,
        num_decode=3,
    )
    alone, together = cache.clone(), cache.clone()
    want = run(model, alone, ids[5:], row)
    got = run(model, together, [ids[5], 0, 0], padded)
    torch.testing.assert_close(got[:1], want, atol=1e-5, rtol=1e-5)
    assert got.isfinite().all()
    written = ~torch.isnan(together)
    assert torch.equal(written, ~torch.isnan(alone))
    torch.testing.assert_close(together[written], alone[written], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype, tiny_model: Make, reference: Refer) -> None:
    path = tiny_model("qwen3", initializer_range=0.1)
    ids = torch.randint(VOCAB_SIZE, (9,)).tolist()
    want = reference(path).logits(ids)
    for backend in ("torch", "sdpa"):
        model = load(path, backend, dtype)
        logits = run(model, empty_cache(model, 3), ids, batch_of([([2, 0, 1], 0, 9)], 0))
        assert logits.dtype == dtype
        error = (logits.float() - want).abs().max() / want.abs().max()
        assert float(error) < 0.05
