"""Case K16: every decode size has a bucket. (The replay itself is tested where there is a GPU.)"""

from __future__ import annotations

import pytest

from minivllm.engine.decode_graphs import decode_buckets
from minivllm.engine.graphs import pick_bucket


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 12, 15, 17, 100, 200, 256, 257, 300, 511, 600])
def test_k16_every_batch_size_has_a_bucket(limit: int) -> None:
    buckets = decode_buckets(limit)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == limit  # no buffer is larger than asked, and the limit itself is covered
    for rows in range(1, limit + 1):
        bucket = pick_bucket(buckets, rows)
        smaller = [size for size in buckets if size < bucket]
        assert bucket >= rows and all(size < rows for size in smaller)
        assert bucket - rows < (8 if rows <= 64 else 16 if rows <= 256 else 32), (rows, bucket)
