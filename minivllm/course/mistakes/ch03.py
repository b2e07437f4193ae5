"""Chapter 03, RoPE: what people write instead.

One classic is not here: rotating v. A unit that sees one tensor cannot do it; the decoder layer of
lesson 05 can, and has it in its list.
"""

from __future__ import annotations

import math

import torch

from minivllm.course.mistakes import mistake
from minivllm.ops.rope import apply_rope, rope_table


def _table(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angle.cos(), angle.sin()


def _angles(head_dim: int, max_position: int, theta: float) -> torch.Tensor:
    """The right angles, [P, D/2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.outer(torch.arange(max_position, dtype=torch.float32), theta**-exponent)


@mistake(
    "ch03.1",
    "theta power halved",
    "the power of theta is -i / D; it is -2 i / D, so that the frequencies reach down to about "
    "1 / theta and not only to its root.",
    engine_visible=True,
)
def power_halved(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = torch.arange(head_dim // 2, dtype=torch.float32) / head_dim
    return _table(torch.outer(torch.arange(max_position).float(), theta**-exponent))


@mistake(
    "ch03.1",
    "theta power positive",
    "the minus sign of the power is missing: each pair turns faster than the one before, not "
    "more slowly.",
    engine_visible=True,
)
def power_positive(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return _table(torch.outer(torch.arange(max_position).float(), theta**exponent))


@mistake(
    "ch03.1",
    "last pair too slow",
    "the powers run from 0 to 1 inclusive (linspace); the last one is (D - 2) / D, because the "
    "steps are 2 / D.",
    engine_visible=True,
)
def inclusive_powers(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = torch.linspace(0, 1, head_dim // 2)
    return _table(torch.outer(torch.arange(max_position).float(), theta**-exponent))


@mistake(
    "ch03.1",
    "theta fixed",
    "it uses 10 000 whatever theta is; each checkpoint brings its own.",
)
def theta_fixed(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(head_dim, max_position, 10000.0)


@mistake(
    "ch03.1",
    "positions from one",
    "row 0 holds the angles of position 1; positions start at 0. The text would not change "
    "(attention sees differences only), but a table must say what its contract says.",
)
def positions_from_one(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_table(head_dim, max_position + 1, theta)
    return cos[1:], sin[1:]


@mistake(
    "ch03.1",
    "full width",
    "the table is [P, D], every angle twice, as some libraries keep it; here it is [P, D/2].",
    engine_visible=True,
)
def full_width(head_dim: int, max_position: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_table(head_dim, max_position, theta)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@mistake(
    "ch03.1",
    "sin before cos",
    "the order is (cos, sin).",
    engine_visible=True,
)
def sin_before_cos(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_table(head_dim, max_position, theta)
    return sin, cos


@mistake(
    "ch03.1",
    "turns for radians",
    "pair 0 makes a full turn a token (a factor of 2 pi); it moves by one radian.",
    engine_visible=True,
)
def full_turns(head_dim: int, max_position: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _table(_angles(head_dim, max_position, theta) * (2 * math.pi))


@mistake(
    "ch03.1",
    "half-precision angles",
    "the angles are rounded to 16 bits: at position 500 they are off by up to a quarter of a "
    "radian. Keep float32 up to the cosine and after it.",
    engine_visible=True,
)
def half_angles(
    head_dim: int, max_position: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _table(_angles(head_dim, max_position, theta).half().float())


@mistake(
    "ch03.2",
    "adjacent pairs",
    "the pairs are neighbours (2i, 2i + 1), as in the paper; these checkpoints use the half "
    "split (i, i + D/2).",
    engine_visible=True,
)
def adjacent_pairs(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    a, b = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2).to(x.dtype)


@mistake(
    "ch03.2",
    "pairings mixed",
    "the halves are paired (i, i + D/2), but each angle is laid out twice in a row (0, 0, 1, 1, "
    "...), which belongs to neighbours. The two halves use the same D/2 angles.",
    engine_visible=True,
)
def pairings_mixed(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c = cos[positions].unsqueeze(1).repeat_interleave(2, dim=-1)
    s = sin[positions].unsqueeze(1).repeat_interleave(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return (x.float() * c + torch.cat((-b, a), dim=-1) * s).to(x.dtype)


@mistake(
    "ch03.2",
    "positions ignored",
    "row t of x gets row t of the table. The token's position is positions[t]: after a prefix, "
    "and in decoding, it is not the row number.",
    engine_visible=True,
)
def positions_ignored(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    return apply_rope(x, torch.arange(x.shape[0]), cos, sin)


@mistake(
    "ch03.2",
    "counted from the first",
    "the positions are counted from the first token of the call; they are places in the whole "
    "sequence.",
    engine_visible=True,
)
def counted_from_first(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    return apply_rope(x, positions - positions.min(), cos, sin)


@mistake(
    "ch03.2",
    "turned backwards",
    "the rotation runs the other way round: the minus sign belongs to the first half.",
    engine_visible=True,
)
def turned_backwards(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    return apply_rope(x, positions, cos, -sin)


@mistake(
    "ch03.2",
    "two minus signs",
    "both halves subtract. That is no rotation: vectors change their length. The second half adds "
    "first * sin.",
    engine_visible=True,
)
def two_minus_signs(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * c - b * s, b * c - a * s), dim=-1).to(x.dtype)


@mistake(
    "ch03.2",
    "new first half reused",
    "the second half is computed from the first half after that was overwritten; both need the "
    "old values.",
    engine_visible=True,
)
def first_half_reused(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    out = x.float().clone()
    a, b = out.chunk(2, dim=-1)  # views of out
    a.copy_(a * c - b * s)
    b.copy_(b * c + a * s)
    return out.to(x.dtype)


@mistake(
    "ch03.2",
    "x overwritten",
    "it rotates x in place; x may be a view of a tensor that the caller still needs.",
)
def x_overwritten(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    return x.copy_(apply_rope(x, positions, cos, sin))


@mistake(
    "ch03.2",
    "angle by head",
    "the table's rows are laid along the heads; the axis to add is the one of the heads, so that "
    "all heads of a token turn alike.",
    engine_visible=True,
)
def angle_by_head(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c, s = cos[positions].unsqueeze(0), sin[positions].unsqueeze(0)  # [1, T, D/2]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


@mistake(
    "ch03.2",
    "stays float32",
    "the table is float32 and lifts the result to float32; it must go back to x.dtype.",
)
def stays_float32(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    return apply_rope(x.float(), positions, cos, sin)


@mistake(
    "ch03.2",
    "multiplied in half precision",
    "cos and sin are cast to x.dtype, so products and sums are rounded to 16 bits. Where the two "
    "products all but cancel, little is left that is right. Multiply in float32, then cast.",
)
def half_products(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c, s = (table[positions].unsqueeze(1).to(x.dtype) for table in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


@mistake(
    "ch03.2",
    "half the head",
    "only the first half of each head is rotated (as models with partial rotary do); here all D "
    "numbers take part.",
    engine_visible=True,
)
def half_the_head(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    half, pairs = x.shape[-1] // 2, x.shape[-1] // 4
    turned = apply_rope(x[..., :half], positions, cos[:, :pairs], sin[:, :pairs])
    return torch.cat((turned, x[..., half:]), dim=-1)
