"""The flash_attn package's own kernels: against the torch forms, and inside the engine."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from gpu_tools import DEVICE, assert_near_best, engine, greedy, ids, prompts, run

from minivllm.ops import compose, flash_attn
from minivllm.ops.attention import attention, paged_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("graphs"),  # needs a card, whatever MINIVLLM_TEST_DEVICE says
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is None, reason="no package flash_attn"
    ),
]
plain_prefill = compose.compose_prefill_attention(attention)
BLOCK = 256
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
DIMS = pytest.mark.parametrize("dim", [64, 128])
GROUPS = pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (8, 8), (12, 2)])
BF16 = 0.35  # the largest regret in logits, see test_greedy


@pytest.fixture(autouse=True)
def able() -> None:
    if torch.cuda.get_device_capability() < flash_attn.CAPABILITY:
        pytest.skip("compute capability below 8.0")


def cache(
    lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype, spare: int = 2
) -> tuple[torch.Tensor, ...]:
    """k_cache, v_cache, block_tables, context_lens at scattered blocks.

    NaN in blocks that nobody owns. Behind a row's last token large numbers: a kernel may weigh
    them with 0, and an engine's pool, zeros at first, never holds a NaN there.
    """
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    shape = (2, len(order), BLOCK, kv_heads, dim)
    kv = torch.randn(shape, generator=generator)
    tables = torch.full((len(lengths), max(counts) + spare), -1, dtype=torch.int32)
    free = torch.ones(len(order), dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        free[blocks] = False
        if blocks:
            kv[:, blocks[-1], length - (count - 1) * BLOCK :] = 1e4
    kv[:, free] = math.nan
    k, v = kv.to(dtype).to(DEVICE)
    return k, v, tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    atol = TOLERANCE[want.dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=atol)


def queries(count: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, heads, dim, generator=generator).to(dtype).to(DEVICE)


@TYPES
@DIMS
@GROUPS
def test_prefill(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Whole prompts, chunks, hits and last tokens in one launch."""
    lengths, counts = [1, 40, 256, 257, 300, 700, 513], [1, 40, 256, 1, 44, 700, 200]
    bounds = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    q = queries(sum(counts), heads, dim, dtype)
    args = (q, *cache(lengths, kv_heads, dim, dtype), bounds, max(counts), dim**-0.5)
    close(flash_attn.prefill_attention(*args), plain_prefill(*args))


@TYPES
@DIMS
@GROUPS
def test_decode(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Pad rows yield zeros, though their tables name no block and the cache is full of NaN."""
    lengths = [1, 0, 255, 256, 257, 0, 2000]
    q = queries(len(lengths), heads, dim, dtype)
    args = (q, *cache(lengths, kv_heads, dim, dtype), dim**-0.5)
    got = flash_attn.paged_decode(*args)
    close(got, paged_decode(*args))
    assert not got[[1, 5]].any()


@TYPES
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_decode_of_pads_alone(rows: int, dtype: torch.dtype) -> None:
    q = queries(rows, 16, 128, dtype)
    args = (q, *cache([0] * rows, 8, 128, dtype, spare=20), 0.1)
    assert torch.equal(flash_attn.paged_decode(*args), torch.zeros_like(q))


def test_decode_is_captured_once_and_replayed_at_any_length() -> None:
    """A graph recorded over pads alone, with the numbers of real rows written in afterwards."""
    dtype, lengths = torch.bfloat16, [300, 0, 17, 1023]
    q = queries(4, 16, 128, dtype)
    k, v, tables, lens = cache(lengths, 8, 128, dtype)
    table_in, lens_in = torch.full_like(tables, -1), torch.zeros_like(lens)
    flash_attn.paged_decode(q, k, v, table_in, lens_in, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn.paged_decode(q, k, v, table_in, lens_in, 0.1)
    table_in.copy_(tables)
    for drop in (0, 1):
        lens_in.copy_((lens - drop).clamp(min=0))
        graph.replay()
        close(out, paged_decode(q, k, v, tables, lens_in, 0.1))
        assert not out[1].any()


@pytest.mark.parametrize("eager", [False, True])
def test_engine(eager: bool, tiny_model, reference) -> None:
    """Contexts that cross a block; each token near the best, and nearly always triton's own."""
    path = tiny_model("qwen3", initializer_range=0.2, head_dim=64)
    options = {"dtype": "bfloat16", "max_model_len": 400, "num_kvcache_blocks": 32}
    options |= {"enforce_eager": eager, "max_num_batched_tokens": 300}
    batch = prompts((1, 5, 17, 75, 250, 255, 256, 257, 330))
    llm = engine(path, attention_backend="flash_attn", **options)
    assert llm.engine.runner.block_size == BLOCK
    theirs = ids(run(llm, batch))
    assert_near_best(reference(path), batch, theirs, BF16)
    again = run(llm, batch)
    assert sum(output.num_cached_tokens for output in again) >= BLOCK  # of whole blocks alone
    assert_near_best(reference(path), batch, ids(again), BF16)
    options["num_kvcache_blocks"] *= 16
    ours = ids(run(engine(path, **options), batch))
    first = [text[0] for text in theirs]
    agreeing = sum(a == b for a, b in zip(first, (text[0] for text in ours), strict=True))
    assert agreeing >= len(batch) - 1


def test_sampling_and_preemption(tiny_model) -> None:
    """A small pool: sequences give their blocks back and draw the same again."""
    path = tiny_model("qwen3", initializer_range=0.2, head_dim=64)
    options = {"dtype": "bfloat16", "max_model_len": 400, "attention_backend": "flash_attn"}
    llm = engine(path, num_kvcache_blocks=4, **options)
    batch = prompts((250, 240, 230, 17))
    outputs = run(llm, batch, greedy(30))
    assert [len(text) for text in ids(outputs)] == [30] * 4
    assert llm.stats.preemptions > 0


def test_float32_and_8_bit_caches_are_refused(tiny_model) -> None:
    for match, options in (
        ("float16 or bfloat16, and dtype is float32", {"dtype": "float32"}),
        ("kv_cache_dtype='fp8'", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("kvcache_block_size=16 ", {"dtype": "bfloat16", "kvcache_block_size": 16}),
    ):
        with pytest.raises(ValueError, match=match):
            engine(tiny_model("qwen3"), attention_backend="flash_attn", **options)
