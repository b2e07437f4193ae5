"""From logits to the next token in Triton: greedy and random in one pass over the row.

Owns the kernels of `ops/sampling.py`. Programs branch on their row's own numbers, so that one
captured graph serves every mix of greedy, random and filtering rows. Lesson 13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.filters import launch_cut
from minivllm.kernels.philox import gumbel, may_reach, words
from minivllm.kernels.runtime import INTERPRET, begin, check_device, overlaps, padded
from minivllm.ops.sampling import SamplingBatch

GREEDY_BELOW = tl.constexpr(1e-5)  # sampling_params.GREEDY_TEMPERATURE
LEAST = tl.constexpr(-3.4028234663852886e38)  # float32's least finite number
BLOCK = 64 if INTERPRET else 1024  # logits that a program holds at a time


@triton.jit
def _block(p_row, size, vocab_start, block, GROUPS: tl.constexpr):
    """Token ids [GROUPS, 4] of a block, and their logits; -inf outside the row."""
    o_group = vocab_start // 4 + block * GROUPS + tl.arange(0, GROUPS)
    o_id = o_group[:, None] * 4 + tl.arange(0, 4)[None, :]
    o_column = o_id - vocab_start
    m_x = (o_column >= 0) & (o_column < size)
    # [GROUPS, 4]
    b_x = tl.load(p_row + o_column, mask=m_x, other=float("-inf"))
    return o_group, o_id, b_x


@triton.jit
def _best_of_range(
    p_row, size, vocab_start, first, last, reference, cut, inverse_t, greedy,
    seed, sample_index, position, GROUPS: tl.constexpr,
):  # fmt: skip
    """argmax over blocks first..last-1 of (x - reference) / T + noise: (reference, score, id).

    One pass: where a block raises the reference (the largest logit so far), the best score is
    lowered by as much. Noise is made exactly only in blocks where some token may beat the best one
    so far: that takes the logarithms, half of the work, out of most blocks.
    """
    best = tl.full((), float("-inf"), tl.float32)
    best_id = vocab_start + tl.zeros((), tl.int32)
    o_group, o_id, b_next = _block(p_row, size, vocab_start, first, GROUPS)
    for block in range(first, last):
        o_now, o_token, b_x = o_group, o_id, b_next.to(tl.float32)
        # The next block's logits come while this one is worked on.
        o_group, o_id, b_next = _block(p_row, size, vocab_start, block + 1, GROUPS)
        block_max = tl.max(tl.max(b_x, axis=1), axis=0)
        higher = tl.clamp(block_max, reference, -LEAST)
        best += (reference - higher) * inverse_t
        reference = higher
        b_score = (b_x - reference) * inverse_t
        b_score = tl.where(b_score >= cut, b_score, float("-inf"))
        # A block without survivors needs no noise: behind a filter that is most blocks.
        if (greedy == 0) & ((block_max - reference) * inverse_t >= cut):
            b_words = words(seed, sample_index, position, o_now)
            b_may_win = may_reach(b_words, best - b_score).to(tl.int32)
            if tl.max(tl.max(b_may_win, axis=1), axis=0) > 0:
                b_score += gumbel(b_words)
            else:
                b_score += float("-inf")
        block_best = tl.max(tl.max(b_score, axis=1), axis=0)
        if block_best > best:
            best = block_best
            # The lowest id on a tie, within the block as between blocks.
            b_winner = tl.where(b_score == block_best, o_token, 2147483647)
            best_id = tl.min(tl.min(b_winner, axis=1), axis=0)
    return reference, best, best_id


@triton.jit
def _sample_kernel(
    p_logits, p_reals, p_integers, p_best, p_cut, p_reference, p_score, p_id,
    stride_row, size, vocab_start,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, FILTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """id[b] = argmax_j (x[b, j] - max x) / T[b] + gumbel(b, j) over the tokens that survive

    The plain argmax where T[b] is (near) 0. With splits: the winner of a part of the row.
    """
    begin(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(p_reals + row * 3)
    greedy = temperature < GREEDY_BELOW
    reference = tl.full((), LEAST, tl.float32)
    cut = tl.full((), float("-inf"), tl.float32)
    if FILTER:
        # A cut holds relative to the row's largest logit, and is infinite where only that is left.
        cut = tl.load(p_cut + row)
        reference = tl.load(p_best + row)
        greedy = greedy | (cut == float("inf"))
        cut = tl.where(greedy, float("-inf"), cut)
    inverse_t = 1.0 / tl.where(greedy, 1.0, temperature)
    p_integers += row * 4  # top_k, seed, sample_index, position
    # Blocks begin at a multiple of four token ids: a group of four shares one Philox call.
    blocks = tl.cdiv(size + vocab_start % 4, BLOCK)
    per_split = tl.cdiv(blocks, SPLITS)
    first, last = split * per_split, tl.minimum(split * per_split + per_split, blocks)
    reference, score, best_id = _best_of_range(
        p_logits + row * stride_row, size, vocab_start, first, last, reference, cut, inverse_t,
        greedy, tl.load(p_integers + 1), tl.load(p_integers + 2), tl.load(p_integers + 3),
        BLOCK // 4,
    )  # fmt: skip
    if SPLITS > 1:
        tl.store(p_reference + row * SPLITS + split, reference)
        tl.store(p_score + row * SPLITS + split, score)
    tl.store(p_id + row * SPLITS + split, best_id.to(tl.int64))


@triton.jit
def _merge_kernel(
    p_reals, p_cut, p_reference, p_score, p_part_id, p_id,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, FILTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """id[b] = id of the part with the largest reference / T + score; the lowest id on a tie"""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_reals + row * 3)
    greedy = temperature < GREEDY_BELOW
    if FILTER:
        greedy = greedy | (tl.load(p_cut + row) == float("inf"))
    inverse_t = 1.0 / tl.where(greedy, 1.0, temperature)
    o_s = tl.arange(0, BLOCK)
    m_s = o_s < SPLITS
    # [SPLITS], [SPLITS], [SPLITS]
    b_reference = tl.load(p_reference + row * SPLITS + o_s, mask=m_s, other=LEAST)
    b_score = tl.load(p_score + row * SPLITS + o_s, mask=m_s, other=float("-inf"))
    b_id = tl.load(p_part_id + row * SPLITS + o_s, mask=m_s, other=9223372036854775807)
    # The largest reference is subtracted first, or it would swallow the scores' last bits.
    b_total = b_score + (b_reference - tl.max(b_reference, axis=0)) * inverse_t
    b_winner = tl.where(b_total == tl.max(b_total, axis=0), b_id, 9223372036854775807)
    tl.store(p_id + row, tl.min(b_winner, axis=0))


def sample_splits(rows: int) -> int:
    """Programs a row, by the number of rows alone: a graph keeps its grid.

    H200, 151,936 logits: 256 rows in 4 parts take 103 us, 37 in 16 parts 23, one in 32 parts 7.
    """
    return min(32, 1 << (max(1024 // rows, 1).bit_length() - 1))


def sample(logits: torch.Tensor, batch: SamplingBatch, vocab_start: int = 0) -> torch.Tensor:
    """See `ops.sampling.sample`. logits: [B, V] -> token ids [B] int64.

    Without `batch.any_filter` the search for cuts is not launched: a captured graph has it True.
    """
    if batch.any_filter and vocab_start:
        raise ValueError(f"vocab_start={vocab_start}: top_k, top_p, min_p need the whole row")
    return launch_sample(logits, batch, vocab_start, sample_splits(max(len(logits), 1)), BLOCK, 4)


def launch_sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    vocab_start: int,
    splits: int,
    block: int,
    num_warps: int,
) -> torch.Tensor:
    """`sample` with a given number of splits and logits a turn; benchmarks compare them."""
    check_device("sample", logits)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    pdl = overlaps(logits.device, rows)
    best, cut = launch_cut(logits, batch) if batch.any_filter else (None, None)
    reference = score = None
    part_id = out
    if splits > 1:
        reference, score = (
            torch.empty(rows, splits, dtype=torch.float32, device=out.device) for _ in range(2)
        )
        part_id = torch.empty(rows, splits, dtype=torch.int64, device=out.device)
    _sample_kernel[(rows, splits)](
        logits, batch.reals, batch.integers, best, cut, reference, score, part_id,
        logits.stride(0), size, vocab_start,
        splits, block, batch.any_filter, pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows,)](
            batch.reals, cut, reference, score, part_id, out,
            splits, padded(splits), batch.any_filter, pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
