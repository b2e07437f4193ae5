"""Chapter 04: Causal GQA attention (45 minutes, 8 points).

Let each token read the tokens before it: masked softmax attention, several query heads on one KV
head.
Replace each `raise NotImplementedError`, then run:
    pytest exercises/test_ch04_attention.py
Stuck? minivllm course hint ch04.1
To look around: minivllm course try ch04
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, q_start: int
) -> torch.Tensor:
    """Causal attention of one sequence's queries over its keys, with grouped KV heads.

    q: [Tq, Hq, D] float32, float16 or bfloat16; k, v: [Tk, Hkv, D] in the same dtype, Hq a multiple
    of Hkv; scale: a float that multiplies the scores; q_start: an int.
    Row j of k and v is position j. Row i of q is position q_start + i: the queries may be the end
    of the sequence (q_start > 0) or a part of it, with later keys behind (Tk > q_start + Tq).
    Query head h reads KV head h // (Hq // Hkv): neighbouring query heads share one.
    Returns [Tq, Hq, D] in q.dtype:  for each query and head
      scores[j] = scale * (q . k[j]) for the positions j <= the query's own, none for later ones;
      the sum over j of softmax(scores)[j] * v[j].

    Scores and softmax are float32 whatever q.dtype is, and stay finite for scores in the thousands.
    The inputs are left as they were.

    Not allowed: scaled_dot_product_attention, multi_head_attention_forward, MultiheadAttention,
    flex_attention.

    Example:
        >>> k = torch.tensor([[[0.0], [0.0]], [[2.0], [4.0]], [[4.0], [-4.0]]])  # Tk=3, Hkv=2, D=1
        >>> v = torch.tensor([[[1.0], [10.0]], [[2.0], [20.0]], [[3.0], [30.0]]])
        >>> q = torch.tensor([[[1.0], [-1.0], [1.0], [-1.0]], [[0.0], [1.0], [0.0], [1.0]]])  # Hq=4
        >>> out = attention(q, k, v, scale=0.5, q_start=1)  # Tq=2: positions 1 and 2
        >>> out[..., 0]  # heads 0 and 1 read KV head 0, heads 2 and 3 read KV head 1
        tensor([[ 1.7311,  1.2689, 18.8080, 11.1920],
                [ 2.0000,  2.5752, 20.0000, 18.9857]])
    """
    # TODO(ch04.1): scores, mask by position, softmax over the keys, weighted sum of the values
    raise NotImplementedError("ch04.1: attention")
