"""Chapter 05, the model: what people write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from minivllm.course.mistakes import mistake
from minivllm.stages.decoder import PACKED, DecoderLayer

Rope = tuple[torch.Tensor, torch.Tensor]


def attention_half(
    layer: DecoderLayer,
    h: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    ops: Any,
    attend: Callable[..., torch.Tensor],
    head_norm: str = "before",
    order: str = "qkv",
    rotate: str = "qk",
    bias: bool = True,
    qk_weights: str = "qk",
    repeat: int = 1,
) -> torch.Tensor:
    """What is added to the stream: right with the defaults, wrong with any other value."""
    c, w, at = layer.config, layer.w, "self_attn."
    qkv = F.linear(h, w[f"{at}qkv_proj.weight"], w.get(f"{at}qkv_proj.bias") if bias else None)
    q, *rest = qkv.split([c.q_size, c.kv_size, c.kv_size], dim=-1)
    k, v = rest if order == "qkv" else reversed(rest)
    q, k, v = (part.unflatten(-1, (-1, c.head_dim)) for part in (q, k, v))

    def normed(heads: torch.Tensor, name: str) -> torch.Tensor:
        return ops.rms_norm(heads, w[f"{at}{name}_norm.weight"], c.rms_norm_eps)

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        return ops.apply_rope(heads, positions, *rope)

    if c.qk_norm and head_norm == "before":
        q, k = normed(q, qk_weights[0]), normed(k, qk_weights[1])
    q, k, v = (rotated(x) if name in rotate else x for name, x in zip("qkv", (q, k, v)))
    if c.qk_norm and head_norm == "after":
        q, k = normed(q, qk_weights[0]), normed(k, qk_weights[1])
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return layer.linear(f"{at}o_proj", attend(layer.index, q, k, v).flatten(1))


def mlp_half(layer: DecoderLayer, h: torch.Tensor, act: Any = F.silu, on: str = "gate") -> Any:
    """What is added to the stream: right with the defaults."""
    gate, up = layer.linear("mlp.gate_up_proj", h).chunk(2, dim=-1)
    if on == "both":
        return layer.linear("mlp.down_proj", act(gate * up))
    gate, up = (gate, up) if on == "gate" else (up, gate)
    return layer.linear("mlp.down_proj", act(gate) * up)


def before_attention(layer: DecoderLayer, x: torch.Tensor, ops: Any) -> torch.Tensor:
    return ops.rms_norm(x, layer.w["input_layernorm.weight"], layer.config.rms_norm_eps)


def before_mlp(layer: DecoderLayer, x: torch.Tensor, ops: Any) -> torch.Tensor:
    return ops.rms_norm(x, layer.w["post_attention_layernorm.weight"], layer.config.rms_norm_eps)


@mistake(
    "ch05.1",
    "q/k norm skipped",
    "Qwen3 normalises every head of q and k before it rotates them (c.qk_norm).",
    engine_visible=True,
)
class NoHeadNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, head_norm="skipped")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "q/k norm after RoPE",
    "the heads are rotated and then normalised. The norm has a weight for each dimension, so "
    "the order counts: normalise first.",
    engine_visible=True,
)
class HeadNormLate(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, head_norm="after")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "q and k norm weights swapped",
    "q is normalised with the weight of k and k with that of q.",
    engine_visible=True,
)
class HeadNormSwapped(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, qk_weights="kq")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "k and v swapped",
    "the packed projection holds q, then k, then v.",
    engine_visible=True,
)
class KeysForValues(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, order="qvk")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "v rotated",
    "v is rotated like q and k. Only q and k carry the position, v carries content.",
    engine_visible=True,
)
class ValuesRotated(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, rotate="qkv")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "positions from 0",
    "it rotates by 0, 1, 2, ... and ignores positions: a token that comes later in the text "
    "is then taken for its beginning.",
    engine_visible=True,
)
class PositionsFromZero(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        positions = torch.arange(x.shape[0])
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "bias ignored",
    "the bias of q, k and v (Qwen2) is left out; self.linear adds it where there is one.",
)
class BiasIgnored(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, bias=False)
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "residual from the norm",
    "the attention result is added to the normalised copy; the stream itself must go on.",
    engine_visible=True,
)
class ResidualFromNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = h + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "norm after the sum",
    "each half adds first and normalises the sum (post-norm, as in the first Transformer). "
    "Here a half reads a normalised copy and adds to the plain stream.",
    engine_visible=True,
)
class PostNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        x = x + attention_half(self, x, positions, rope, ops, attend)
        x = before_attention(self, x, ops)
        x = x + mlp_half(self, x)
        return before_mlp(self, x, ops)


@mistake(
    "ch05.1",
    "MLP beside attention",
    "both halves read the same x; the MLP must read the stream that attention has already "
    "added to.",
    engine_visible=True,
)
class Parallel(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        attended = attention_half(self, h, positions, rope, ops, attend)
        return x + attended + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "first residual lost",
    "the attention result replaces the stream in place of being added to it.",
    engine_visible=True,
)
class FirstResidualLost(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "second residual lost",
    "the MLP result replaces the stream in place of being added to it.",
    engine_visible=True,
)
class SecondResidualLost(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "one norm for both halves",
    "the MLP half uses input_layernorm again; it has a weight of its own, "
    "post_attention_layernorm.",
    engine_visible=True,
)
class OneNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_attention(self, x, ops))


@mistake(
    "ch05.1",
    "silu on up",
    "silu is applied to up and multiplied by gate; it is silu(gate) * up, and gate is the "
    "first half of the packed product.",
    engine_visible=True,
)
class SiluOnUp(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops), on="up")


@mistake(
    "ch05.1",
    "no silu",
    "gate and up are multiplied without silu, so nothing in the MLP half is left that bends.",
    engine_visible=True,
)
class NoSilu(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops), act=lambda gate: gate)


@mistake(
    "ch05.1",
    "GELU for SiLU",
    "it uses GELU; these models were trained with silu(x) = x * sigmoid(x).",
    engine_visible=True,
)
class Gelu(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops), act=F.gelu)


@mistake(
    "ch05.1",
    "x overwritten",
    "x += changes the caller's tensor; write x = x + ... to make a new one.",
)
class InPlace(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        x += attention_half(self, before_attention(self, x, ops), positions, rope, ops, attend)
        x += mlp_half(self, before_mlp(self, x, ops))
        return x


@mistake(
    "ch05.1",
    "positions counted from the first",
    "it takes the first of positions and counts on from there. They may jump and repeat: pass "
    "all of them on to ops.apply_rope.",
)
class PositionsCounted(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        positions = positions[0] + torch.arange(x.shape[0])
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "k not rotated",
    "q is rotated and k is not. The angle between them tells how far apart two tokens are, so "
    "both must turn.",
    engine_visible=True,
)
class KeysUnrotated(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, rotate="q")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "q not rotated",
    "k is rotated and q is not. The angle between them tells how far apart two tokens are, so "
    "both must turn.",
    engine_visible=True,
)
class QueriesUnrotated(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, rotate="k")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "no RoPE",
    "neither q nor k is rotated, so the layer does not know the order of the tokens.",
    engine_visible=True,
)
class Unrotated(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend, rotate="")
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "KV heads repeated",
    "the heads of k and v are repeated before attend. Pass the Hkv heads that there are: "
    "attention shares them out, and a cache behind it keeps no copies.",
    engine_visible=True,
)
class HeadsRepeated(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(
            self,
            h,
            positions,
            rope,
            ops,
            attend,
            repeat=self.config.num_heads // self.config.num_kv_heads,
        )
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "MLP reads the old h",
    "the MLP half reads the h of the attention half. It must normalise the new x, to which "
    "attention has been added.",
    engine_visible=True,
)
class MlpOldNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, h)


@mistake(
    "ch05.1",
    "second norm missing",
    "the MLP half reads the stream as it is; it must read a copy normalised with "
    "post_attention_layernorm.",
    engine_visible=True,
)
class NoSecondNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, x)


@mistake(
    "ch05.1",
    "first norm missing",
    "the attention half reads the stream as it is; it must read a copy normalised with "
    "input_layernorm.",
    engine_visible=True,
)
class NoFirstNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        x = x + attention_half(self, x, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


@mistake(
    "ch05.1",
    "norm of what is added",
    "the norms stand behind the halves: what a half gives is normalised, what it reads is "
    "not. It is the other way round.",
    engine_visible=True,
)
class NormOfResults(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        added = attention_half(self, x, positions, rope, ops, attend)
        x = x + before_attention(self, added, ops)
        return x + before_mlp(self, mlp_half(self, x), ops)


@mistake(
    "ch05.1",
    "ReLU for SiLU",
    "it uses ReLU; these models were trained with silu(x) = x * sigmoid(x).",
    engine_visible=True,
)
class Relu(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops), act=F.relu)


@mistake(
    "ch05.1",
    "sigmoid for SiLU",
    "the gate is sigmoid(gate), without the factor: silu(x) = x * sigmoid(x).",
    engine_visible=True,
)
class Sigmoid(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops), act=torch.sigmoid)


@mistake(
    "ch05.1",
    "silu of the product",
    "it takes silu(gate * up); silu is for the gate alone: silu(gate) * up.",
    engine_visible=True,
)
class SiluOfProduct(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops), on="both")


class TorchNorm:
    """Ops whose norm is torch's."""

    def __init__(self, ops: Any) -> None:
        self.apply_rope = ops.apply_rope

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)


@mistake(
    "ch05.1",
    "torch's norm",
    "the norms are torch's. Use ops.rms_norm: the norm of the chapter before, which --chain "
    "makes your own.",
)
class NotOpsNorm(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        ops = TorchNorm(ops)
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


class OwnRope:
    """Ops whose rotation is written out here."""

    def __init__(self, ops: Any) -> None:
        self.rms_norm = ops.rms_norm

    def apply_rope(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        one, two = x.chunk(2, dim=-1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


@mistake(
    "ch05.1",
    "RoPE written out",
    "the rotation is written out again. Use ops.apply_rope: the rotation of the chapter "
    "before, which --chain makes your own.",
)
class NotOpsRope(DecoderLayer):
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        ops = OwnRope(ops)
        h = before_attention(self, x, ops)
        x = x + attention_half(self, h, positions, rope, ops, attend)
        return x + mlp_half(self, before_mlp(self, x, ops))


def load(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
    packed: dict[str, tuple[str, int]] = PACKED,
    offset: Callable[[list[int], int], int] = lambda rows, part: sum(rows[:part]),
) -> set[str]:
    """load_weights: right with the defaults."""
    unused = set()
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".")
        prefix, dot, module = stem.rpartition(".")
        whole, part = packed.get(module, (module, None))
        target = weights.get(f"{prefix}{dot}{whole}.{kind}")
        if target is None:
            unused.add(name)
        elif part is None:
            target.copy_(tensor)
        else:
            start = offset(sizes[whole], part)
            target[start : start + len(tensor)] = tensor
    return unused


@mistake(
    "ch05.2",
    "k and v stacked the wrong way",
    "v lies before k in the packed matrix; the order is q, k, v.",
    engine_visible=True,
)
def v_before_k(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    swapped = {**PACKED, "k_proj": ("qkv_proj", 2), "v_proj": ("qkv_proj", 1)}
    widths = {**sizes, "qkv_proj": [sizes["qkv_proj"][i] for i in (0, 2, 1)]}
    return load(weights, tensors, widths, swapped)


@mistake(
    "ch05.2",
    "gate and up swapped",
    "up lies before gate in the packed matrix; the layer takes the first half for gate.",
    engine_visible=True,
)
def gate_up_swapped(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    swapped = {**PACKED, "gate_proj": ("gate_up_proj", 1), "up_proj": ("gate_up_proj", 0)}
    return load(weights, tensors, sizes, swapped)


@mistake(
    "ch05.2",
    "every part at row 0",
    "every part is written to the first rows of the packed tensor, over the part before it. A "
    "part begins behind the parts before it.",
    engine_visible=True,
)
def all_at_zero(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    return load(weights, tensors, sizes, offset=lambda rows, part: 0)


@mistake(
    "ch05.2",
    "parts of equal height",
    "it takes part k to begin at k times its own height. With fewer KV heads than query heads "
    "the parts differ: add up the rows of the parts before.",
    engine_visible=True,
)
def equal_parts(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    return load(weights, tensors, sizes, offset=lambda rows, part: part * rows[part])


@mistake(
    "ch05.2",
    "tied head",
    "it takes every model for one with tied embeddings and skips lm_head.weight. Whether "
    "there is a head is seen from `weights`: if there is a place for it, fill it.",
)
def always_tied(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    rest = [(name, tensor) for name, tensor in tensors if name != "lm_head.weight"]
    return load(weights, rest, sizes)


@mistake(
    "ch05.2",
    "head over the embedding",
    "where there is no place for lm_head.weight it is written into the embedding. Return its "
    "name: the file may hold a copy that nobody needs.",
)
def head_over_embedding(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    weights = {**weights}
    weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight"))
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    return load(weights, tensors, sizes)


@mistake(
    "ch05.2",
    "biases forgotten",
    'only names that end in "weight" are loaded. The biases of q, k and v (Qwen2) are packed '
    "in the same way.",
)
def weights_only(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    pairs = list(tensors)
    unused = load(weights, [pair for pair in pairs if not pair[0].endswith(".bias")], sizes)
    return unused | {name for name, _ in pairs if name.endswith(".bias")}


@mistake(
    "ch05.2",
    "tensors replaced",
    "it puts new tensors into `weights`. The layers hold the old ones and never see them: "
    "copy into the tensor that is there.",
    engine_visible=True,
)
def replaced(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    filled = {name: tensor.clone() for name, tensor in weights.items()}
    unused = load(filled, tensors, sizes)
    weights.update(filled)
    return unused


@mistake(
    "ch05.2",
    "unknown names swallowed",
    "names without a place are dropped silently; return them, or a misspelt layer goes unseen.",
)
def swallowed(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    load(weights, tensors, sizes)
    return set()


@mistake(
    "ch05.2",
    "unknown names raise",
    "a name without a place raises KeyError. It is returned: the caller knows whether it matters.",
)
def raising(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    unused = load(weights, tensors, sizes)
    for name in unused:
        raise KeyError(name)
    return unused


@mistake(
    "ch05.2",
    "tensors read twice",
    "it goes through `tensors` twice. They may come from a generator, which is empty the second "
    "time: do all in one pass, or keep what the first one gave.",
)
def read_twice(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    names = {name for name, _ in tensors}
    return load(weights, tensors, sizes) & names


@mistake(
    "ch05.2",
    "tensors taken for a list",
    "it takes the length of `tensors`, or an item by its index. They may come from a generator, "
    "which has neither: go through it in a for loop.",
)
def taken_for_a_list(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    pairs: Any = tensors
    return load(weights, (pairs[i] for i in range(len(pairs))), sizes)
