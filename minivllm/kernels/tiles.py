"""Sizes of the attention kernels' tiles, by the card's capability, and the number of splits.

Owns the one table of configurations, and the estimate of the shared memory they take. Never asks
the card: all functions are of plain numbers, so that the choice for a card can be tested without
one. Lesson 13.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

KIB = 1024
# Shared memory that one program may take. Cards not listed here are taken for the smallest of
# their kind (8.6, 8.9 and 12.0 have 99 KiB).
_SHARED_MEMORY = {
    (7, 5): 64 * KIB,
    (8, 0): 163 * KIB,
    (8, 7): 163 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
}
# tl.dot has no smaller tile; the interpreter would take one, and a GPU refuse it.
LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time: block_m query rows by block_n tokens of the cache."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory a program may use on a card of this capability."""
    return _SHARED_MEMORY.get(capability, 99 * KIB if capability >= (8, 0) else 48 * KIB)


def tile_bytes(tile: Tile, head_dim: int, q_bytes: int, kv_bytes: int) -> int:
    """Shared memory of a tile: q, the stages of k and v, and the probabilities on their way."""
    dim = padded_dim(head_dim)
    buffers = max(tile.num_stages, 1) * 2 * tile.block_n * dim * kv_bytes
    # 8-bit keys and values pass through shared memory once more, as 16 bits.
    widened = 2 * tile.block_n * dim * 2 if kv_bytes == 1 else 0
    return buffers + widened + tile.block_m * (dim + tile.block_n) * q_bytes


def padded_dim(head_dim: int) -> int:
    """The power of two that holds a head, at least 16."""
    return max(LEAST_ROWS, 1 << (head_dim - 1).bit_length())


@cache
def select_tile(
    kernel: str,
    capability: tuple[int, int],
    head_dim: int,
    q_bytes: int,
    kv_bytes: int,
    group: int = 1,
    splits: int = 1,
) -> Tile:
    """The tile of "decode" or "prefill" on a card; (0, 0) is the interpreter.

    q_bytes and kv_bytes: bytes of an element of q and of the cache; group: query heads of a KV head
    (decode packs them into one tile). The first candidate that fits the shared memory is taken.
    ValueError where none does.
    """
    rows = max(LEAST_ROWS, 1 << (group - 1).bit_length())
    if capability == (0, 0):  # the interpreter pays by the operation, and tests want many tiles
        candidates = [Tile(LEAST_ROWS, 16, 4, 1)]
    elif kernel == "decode":
        candidates = _decode_tiles(capability, rows, q_bytes, kv_bytes, splits)
    else:
        candidates = _prefill_tiles(capability, q_bytes)
    for tile in candidates:
        if tile_bytes(tile, head_dim, q_bytes, kv_bytes) <= shared_memory(capability):
            return tile if kernel == "prefill" else replace(tile, block_m=rows)
    raise ValueError(
        f"no {kernel} tile for head_dim={head_dim} fits the {shared_memory(capability)} bytes of "
        f"shared memory of capability {capability[0]}.{capability[1]}"
    )


def _decode_tiles(
    capability: tuple[int, int], rows: int, q_bytes: int, kv_bytes: int, splits: int
) -> list[Tile]:
    """Best first, as measured on an H200 (H = 16/8 heads of 128, bfloat16, 256 rows).

    One warp a program and five stages: 4.27 TB/s; two warps 4.08; 64 tokens and two warps 4.04.
    A single warp never waits for another, and many small programs hide each other's waiting.
    """
    # Before 8.0 there is no copy past the registers: stages would only take memory. Without
    # tensor cores (float32, and Turing in today's Triton) a small tile keeps to the registers.
    if capability < (8, 0) or (q_bytes == 4 and kv_bytes != 1):
        return [Tile(rows, 16, 8, 1)]
    if kv_bytes == 1 and splits > 1:  # 8 bits at 77 rows: 3.17 TB/s, with one warp 2.92
        return [Tile(rows, 64, 2, 5), Tile(rows, 32, 1, 5), Tile(rows, 16, 1, 3)]
    return [Tile(rows, 32, 1, 5), Tile(rows, 32, 1, 3), Tile(rows, 16, 1, 3)]


def _prefill_tiles(capability: tuple[int, int], q_bytes: int) -> list[Tile]:
    """Best first: 128 x 64 gives 220 TFLOP/s at prompts of 1024 tokens on an H200, 64 x 64 204."""
    if capability < (8, 0) or q_bytes == 4:
        return [Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)]
    return [Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)]


def decode_splits(rows: int, kv_heads: int) -> int:
    """Parts into which decode attention cuts each context.

    rows: rows of the launch, pad rows included. Of nothing else: a captured graph keeps its grid
    while contexts grow. Enough programs for the card's 132 multiprocessors to be busy until the
    end: on an H200 37 rows of 8 KV heads read 3.53 TB/s in one part, 3.75 in four, 3.50 in
    sixteen.
    """
    programs = rows * kv_heads
    if programs >= 1024:
        return 1
    return min(16, 1 << (max(1280 // programs, 1).bit_length() - 1))
