"""Peak memory is what the code held, seen from outside."""

import torch

from minivllm.bench.live import peak_bytes, storage_bytes
from minivllm.ops.attention import attention

KIB = 1024


def ones(kib):
    return torch.ones(kib * KIB // 4)


def test_views_share_a_storage():
    x = torch.zeros(6, 4)
    assert storage_bytes([x, x[2:], x.t(), torch.zeros(3)]) == 6 * 4 * 4 + 3 * 4


def test_both_alive():
    def both(x):
        a = x + 1
        b = a * 2  # a is still needed
        return a + b  # and now three of them

    assert peak_bytes(both, ones(64)) == 3 * 64 * KIB


def test_freed_tensors_do_not_count():
    def chain(x):
        for _ in range(20):
            x = x + 1  # old and new at once, never three
        return x

    assert peak_bytes(chain, ones(64)) == 2 * 64 * KIB


def test_inputs_and_views_of_them_do_not_count():
    assert peak_bytes(lambda x: x.view(2, -1)[1].t(), ones(64)) == 0
    assert peak_bytes(lambda x: x.add_(1), ones(64)) == 0


def test_nothing_is_kept_between_runs():
    first = peak_bytes(lambda x: x * 2, ones(64))
    assert peak_bytes(lambda x: x * 2, ones(64)) == first == 64 * KIB


def test_attention_holds_whole_score_matrices():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(200, heads, 8, generator=g) for heads in (4, 2, 2))
    scores = 4 * 200 * 200 * 4
    assert scores < peak_bytes(attention, q, k, v, 1.0, 0) < 5 * scores
