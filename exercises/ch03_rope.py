"""Chapter 03: RoPE (35 minutes, 6 points).

Turn each token's position into a rotation, so that attention sees how far apart two tokens are.
Replace each `raise NotImplementedError`, then run:
    pytest exercises/test_ch03_rope.py
Stuck? minivllm course hint ch03.1
To look around: minivllm course try ch03
"""

from __future__ import annotations

import torch


def rope_table(head_dim: int, max_position: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angle of every pair at every position.

    head_dim: D, even; max_position: P; theta: the base of the frequencies, such as 10000.0.
    Returns (cos, sin), each [P, D/2] float32. Row p belongs to position p = 0 .. P-1; column i to
    pair i, whose angle at position p is  p * theta ** (-2 * i / D)  in radians.

    So pair 0 turns by 1 radian per token and each further pair more slowly. Compute in float32.

    Example:
        >>> cos, sin = rope_table(head_dim=4, max_position=3, theta=100.0)
        >>> cos
        tensor([[ 1.0000,  1.0000],
                [ 0.5403,  0.9950],
                [-0.4161,  0.9801]])
        >>> sin
        tensor([[0.0000, 0.0000],
                [0.8415, 0.0998],
                [0.9093, 0.1987]])
    """
    # TODO(ch03.1): one frequency per pair, times every position, then cosine and sine
    raise NotImplementedError("ch03.1: rope_table")


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate every head of each token by the token's position.

    x: [T, H, D] float32, float16 or bfloat16; cos, sin: [P, D/2] float32, as rope_table makes them;
    positions: [T] int64, each in 0 .. P-1. Token t stands at positions[t], wherever its row is: the
    positions may start anywhere, jump and repeat (one step serves several sequences).
    Returns [T, H, D] in x.dtype. Pair i is (x[i], x[i + D/2]), the "half split"; with the angle of
    pair i at the token's position it becomes
      (x[i] * cos - x[i + D/2] * sin,  x[i + D/2] * cos + x[i] * sin).

    Multiply in float32. All heads of a token turn alike. The inputs are left as they were.

    Example:
        >>> cos = torch.tensor([[1.0, 1.0], [0.0, -1.0]])  # D=4: two pairs. At position 1 pair 0
        >>> sin = torch.tensor([[0.0, 0.0], [1.0, 0.0]])  # has turned by 90 degrees, pair 1 by 180
        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # pair 0 is (1, 3), pair 1 is (2, 4)
        >>> apply_rope(x, torch.tensor([1]), cos, sin)
        tensor([[[-3., -2.,  1., -4.]]])
        >>> apply_rope(x, torch.tensor([0]), cos, sin)
        tensor([[[1., 2., 3., 4.]]])
    """
    # TODO(ch03.2): pick each token's row of the table, rotate the pairs (i, i + D/2) of every head
    raise NotImplementedError("ch03.2: apply_rope")
