"""Log-probabilities and ranks against float64 and a full stable sort."""

from __future__ import annotations

import pytest
import torch

from minivllm.ops.logprobs import top_logprobs


def oracle(row, token_id, k):
    """Values, ids, chosen, rank of one row by sorting (-logit, id) pairs in float64."""
    row = row.double()
    shifted = row - row.max()
    logprobs = (shifted - shifted.exp().sum().log()).tolist()
    order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
    ids = order[:k]
    return [logprobs[i] for i in ids], ids, logprobs[token_id], order.index(token_id) + 1


def check(logits, token_ids, k, tolerance=1e-5):
    kept = logits.clone()
    values, ids, chosen, rank = top_logprobs(logits, token_ids, k)
    assert torch.equal(logits, kept)
    assert values.shape == ids.shape == (len(logits), k)
    assert values.dtype == chosen.dtype == torch.float32
    assert ids.dtype == rank.dtype == torch.int64
    for i, row in enumerate(logits):
        want_values, want_ids, want_chosen, want_rank = oracle(row, int(token_ids[i]), k)
        assert ids[i].tolist() == want_ids
        assert int(rank[i]) == want_rank
        assert values[i].tolist() == pytest.approx(want_values, abs=tolerance)
        assert chosen[i].item() == pytest.approx(want_chosen, abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [0, 1, 5, 63])
def test_k28_equals_float64_log_softmax(dtype, k):
    torch.manual_seed(0)
    logits = (torch.randn(7, 63) * 4).to(dtype)
    check(logits, torch.randint(0, 63, (7,)), k)


def test_k28_ties_rank_by_lowest_id():
    torch.manual_seed(0)
    # Five values over 40 tokens: every k cuts through a tie.
    logits = torch.randint(0, 5, (20, 40)).float()
    for k in (1, 3, 7, 20, 40):
        check(logits, torch.randint(0, 40, (20,)), k)
    values, ids, _, _ = top_logprobs(torch.zeros(2, 4096), torch.tensor([0, 4095]), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(values[:, 0], values[:, 2])


def test_k28_chosen_stands_in_the_column_of_its_rank():
    torch.manual_seed(0)
    logits = torch.randint(0, 9, (30, 25)).float()
    token_ids = torch.randint(0, 25, (30,))
    values, ids, chosen, rank = top_logprobs(logits, token_ids, 25)
    column = (rank - 1)[:, None]
    assert torch.equal(ids.gather(1, column).squeeze(1), token_ids)
    assert torch.equal(values.gather(1, column).squeeze(1), chosen)
    greedy = logits.argmax(dim=-1)
    assert top_logprobs(logits, greedy, 1)[3].tolist() == [1] * 30


def test_rank_is_by_logits_where_log_softmax_rounds_them_together():
    # Next to a logit of 4096, float32 log-softmax has steps of 2**-12 and cannot tell these apart.
    logits = torch.tensor([[4096.0, 1e-5, 2e-5, 0.0]])
    _, ids, _, rank = top_logprobs(logits, torch.tensor([1]), 4)
    assert ids.tolist() == [[0, 2, 1, 3]]
    assert rank.tolist() == [3]


def test_huge_and_masked_logits():
    inf = float("inf")
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-inf, 3.0, -inf, -inf]])
    values, ids, chosen, rank = top_logprobs(logits, torch.tensor([0, 2]), 2)
    assert values[0].tolist() == pytest.approx([-0.6931472, -0.6931472])
    assert ids.tolist() == [[0, 3], [1, 0]]
    assert values[1].tolist() == [0.0, -inf]
    assert chosen[1].item() == -inf
    assert rank.tolist() == [1, 3]


def test_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    logits, token_ids = torch.randn(6, 100), torch.randint(0, 100, (6,))
    whole = top_logprobs(logits, token_ids, 4)
    for i in range(6):
        alone = top_logprobs(logits[i : i + 1], token_ids[i : i + 1], 4)
        for a, b in zip(alone, whole, strict=True):
            assert torch.allclose(a[0].double(), b[i].double(), atol=1e-6)


def test_no_rows():
    values, ids, chosen, rank = top_logprobs(torch.zeros(0, 9), torch.zeros(0, dtype=torch.long), 2)
    assert values.shape == ids.shape == (0, 2)
    assert chosen.shape == rank.shape == (0,)


@pytest.mark.parametrize("k", [-1, 10])
def test_k_out_of_range_is_refused_by_name(k):
    with pytest.raises(ValueError, match=rf"logprobs={k} must lie in 0\.\.9"):
        top_logprobs(torch.zeros(1, 9), torch.tensor([0]), k)
