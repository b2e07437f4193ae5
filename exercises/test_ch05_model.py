"""Visible tests of chapter 05. A layer is compared with its formula, computed here in float64."""

from types import SimpleNamespace

import pytest
import torch

from minivllm.config import ModelConfig
from minivllm.stages.model import weight_shapes

SIZES = {"qkv_proj": [6, 4, 2], "gate_up_proj": [3, 3]}


def make_layer(architecture, seed, tokens=5):
    """Config, weights, x and rotation table of a small random model: Hq=4, Hkv=2, D=8, H=24."""
    config = ModelConfig.from_dict(
        {
            "architectures": [architecture],
            "vocab_size": 7,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-2,
        }
    )
    g = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.rand(shape, generator=g) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=g) * 1.5 / shape[-1] ** 0.5
        for name, shape in weight_shapes(config).items()
    }
    x = torch.randn(tokens, config.hidden_size, generator=g)
    angle = torch.outer(torch.arange(16.0), 100.0 ** -(torch.arange(4) / 4))
    return config, weights, x, (angle.cos(), angle.sin())


def qwen3_layer(seed):
    return make_layer("Qwen3ForCausalLM", seed)


def llama_layer(seed):
    return make_layer("LlamaForCausalLM", seed)


def qwen2_layer(seed):
    return make_layer("Qwen2ForCausalLM", seed)


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, positions, rope):
    """Each pair (i, i + D/2) of each head turned by its token's angle."""
    half = x.shape[-1] // 2
    turn = torch.complex(rope[0].double(), rope[1].double())[positions][:, None]
    pairs = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def causal(q, k, v):
    """Attention one query and one head at a time; query head h reads KV head h // 2."""
    out = torch.empty_like(q)
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = k[: t + 1, head // 2], v[: t + 1, head // 2]
            scores = keys @ q[t, head] / q.shape[-1] ** 0.5
            out[t, head] = scores.softmax(0) @ values
    return out


def layer_formula(config, weights, index, x, positions, rope):
    """The layer's result and the q, k, v that attention sees, from the definition, in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    at, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
    x, eps = x.double(), config.rms_norm_eps
    h = norm(x, w[f"model.layers.{index}.input_layernorm.weight"], eps)
    qkv = h @ w[at + "qkv_proj.weight"].T + w.get(at + "qkv_proj.bias", torch.zeros(1))
    q = qkv[:, :32].reshape(-1, 4, 8)
    k = qkv[:, 32:48].reshape(-1, 2, 8)
    v = qkv[:, 48:].reshape(-1, 2, 8)
    if config.qk_norm:
        q, k = norm(q, w[at + "q_norm.weight"], eps), norm(k, w[at + "k_norm.weight"], eps)
    q, k = rotated(q, positions, rope), rotated(k, positions, rope)
    x = x + causal(q, k, v).reshape(-1, 32) @ w[at + "o_proj.weight"].T
    h = norm(x, w[f"model.layers.{index}.post_attention_layernorm.weight"], eps)
    gate, up = (h @ w[mlp + "gate_up_proj.weight"].T).split([40, 40], dim=-1)
    y = x + (gate * gate.sigmoid() * up) @ w[mlp + "down_proj.weight"].T
    return [tensor.float() for tensor in (y, q, k, v)]


def run_layer(layer, x, positions, rope, ops):
    """The layer's result, and the index, q, k and v of its calls of attention."""
    calls = []

    def attend(index, q, k, v):
        calls.append((index, q.clone(), k.clone(), v.clone()))
        return causal(q, k, v)

    return layer.forward(x, positions, rope, ops, attend), calls


@pytest.mark.task("ch05.1")
def test_worked_example(check):
    """the worked example of the stub"""
    check.example()


def parts_of(calls):
    """Each part of each call of attention under a name of its own."""
    return {
        f"call {number}: {name}": value
        for number, call in enumerate(calls)
        for name, value in zip(("index", "q", "k", "v"), call)
    }


def probe_attention(check, recipe):
    """What a layer made by `recipe` hands to attention."""
    config, weights, x, rope = check.inputs(recipe, seed=1)
    positions = torch.arange(5)
    _, q, k, v = layer_formula(config, weights, 1, x, positions, rope)
    check.probe(
        parts_of([(1, q, k, v)]),
        lambda Layer: parts_of(
            run_layer(Layer(config, 1, weights), x.clone(), positions, rope, check.earlier)[1]
        ),
    )


@pytest.mark.task("ch05.1")
def test_what_attention_sees(check):
    """attention is called once, with the layer's index, q and k rotated, v as it came"""
    probe_attention(check, llama_layer)


@pytest.mark.task("ch05.1")
def test_what_attention_sees_in_qwen3(check):
    """in a Qwen3 layer too, where every head of q and k is normalised before it is rotated"""
    probe_attention(check, qwen3_layer)


@pytest.mark.task("ch05.1")
def test_llama_layer(check):
    """a Llama layer: no norm of the heads, no bias"""
    config, weights, x, rope = check.inputs(llama_layer)
    positions = torch.arange(5)
    y, *_ = layer_formula(config, weights, 0, x, positions, rope)
    check.probe(
        y,
        lambda Layer: run_layer(
            Layer(config, 0, weights), x.clone(), positions, rope, check.earlier
        )[0],
    )


@pytest.mark.task("ch05.1")
def test_qwen3_layer(check):
    """a Qwen3 layer: the heads of q and k are normalised, then rotated"""
    config, weights, x, rope = check.inputs(qwen3_layer)
    positions = torch.arange(5)
    y, *_ = layer_formula(config, weights, 1, x, positions, rope)
    check.probe(
        y,
        lambda Layer: run_layer(
            Layer(config, 1, weights), x.clone(), positions, rope, check.earlier
        )[0],
    )


@pytest.mark.task("ch05.1")
def test_qwen2_layer(check):
    """a Qwen2 layer: q, k and v have a bias, which self.linear adds"""
    config, weights, x, rope = check.inputs(qwen2_layer)
    positions = torch.arange(5)
    y, *_ = layer_formula(config, weights, 0, x, positions, rope)
    check.probe(
        y,
        lambda Layer: run_layer(
            Layer(config, 0, weights), x.clone(), positions, rope, check.earlier
        )[0],
    )


@pytest.mark.task("ch05.1")
def test_other_positions(check):
    """positions are those that were passed, with jumps and repeats: 3, 9, 4, 4, 12"""
    config, weights, x, rope = check.inputs(llama_layer, seed=2)
    positions = torch.tensor([3, 9, 4, 4, 12])
    _, q, k, v = layer_formula(config, weights, 0, x, positions, rope)
    check.probe(
        parts_of([(0, q, k, v)]),
        lambda Layer: parts_of(
            run_layer(Layer(config, 0, weights), x.clone(), positions, rope, check.earlier)[1]
        ),
    )


@pytest.mark.task("ch05.1")
def test_two_layers(check):
    """the stream of one layer goes into the next"""
    config, weights, x, rope = check.inputs(llama_layer, seed=3)
    positions = torch.arange(5)

    def two_layers(Layer):
        y = x.clone()
        for index in range(2):
            y, _ = run_layer(Layer(config, index, weights), y, positions, rope, check.earlier)
        return y

    y, *_ = layer_formula(config, weights, 0, x, positions, rope)
    y, *_ = layer_formula(config, weights, 1, y, positions, rope)
    check.probe(y, two_layers)


@pytest.mark.task("ch05.1")
def test_x_stays(check):
    """x and the weights are left as they were"""
    config, weights, x, rope = check.inputs(qwen3_layer, seed=4)

    def nothing_changed(Layer):
        mine, own = x.clone(), {name: tensor.clone() for name, tensor in weights.items()}
        run_layer(Layer(config, 0, own), mine, torch.arange(5), rope, check.earlier)
        return torch.equal(mine, x) and all(torch.equal(own[n], weights[n]) for n in weights)

    check.holds(nothing_changed, "x and all weights hold the same numbers after the call")


def only_zeros(x, *args, **kwargs):
    return torch.zeros_like(x)


@pytest.mark.task("ch05.1")
def test_norms_of_ops(check):
    """every norm is ops.rms_norm, the unit of the earlier chapter: no other will do"""
    config, weights, x, rope = check.inputs(qwen3_layer, seed=5)
    rms_norm, apply_rope = check.earlier.rms_norm, check.earlier.apply_rope

    def no_heads(x, weight, *args, **kwargs):
        heads = weight.shape[-1] == config.head_dim
        return only_zeros(x) if heads else rms_norm(x, weight, *args, **kwargs)

    def nothing_added(Layer):
        ops = SimpleNamespace(rms_norm=only_zeros, apply_rope=apply_rope)
        y, _ = run_layer(Layer(config, 0, weights), x.clone(), torch.arange(5), rope, ops)
        return torch.equal(y, x)

    def heads_gone(Layer):
        ops = SimpleNamespace(rms_norm=no_heads, apply_rope=apply_rope)
        layer = Layer(config, 0, weights)
        ((_, q, k, _),) = run_layer(layer, x.clone(), torch.arange(5), rope, ops)[1]
        return not q.any() and not k.any()

    check.holds(
        nothing_added,
        "both halves get what they read from ops.rms_norm (here one that gives only zeros, with "
        "which the layer must add nothing to x)",
    )
    check.holds(
        heads_gone,
        "the heads of q and k come from ops.rms_norm (here one that gives only zeros for them)",
    )


@pytest.mark.task("ch05.1")
def test_rope_of_ops(check):
    """the rotation is ops.apply_rope, the unit of the earlier chapter: no other will do"""
    config, weights, x, rope = check.inputs(llama_layer, seed=5)
    ops = SimpleNamespace(rms_norm=check.earlier.rms_norm, apply_rope=only_zeros)

    def q_and_k_gone(Layer):
        layer = Layer(config, 0, weights)
        ((_, q, k, v),) = run_layer(layer, x.clone(), torch.arange(5), rope, ops)[1]
        return not q.any() and not k.any() and bool(v.any())

    check.holds(
        q_and_k_gone,
        "q and k, and only they, come from ops.apply_rope (here one that gives only zeros)",
    )


def published(seed, dtype=torch.float32):
    """A checkpoint as it is published: one layer, q, k, v, gate and up apart."""
    g = torch.Generator().manual_seed(seed)
    layer = "model.layers.1."
    shapes = {
        "model.embed_tokens.weight": (5, 4),
        f"{layer}input_layernorm.weight": (4,),
        f"{layer}self_attn.q_proj.weight": (6, 4),
        f"{layer}self_attn.k_proj.weight": (4, 4),
        f"{layer}self_attn.v_proj.weight": (2, 4),
        f"{layer}self_attn.q_proj.bias": (6,),
        f"{layer}self_attn.k_proj.bias": (4,),
        f"{layer}self_attn.v_proj.bias": (2,),
        f"{layer}self_attn.o_proj.weight": (4, 6),
        f"{layer}mlp.gate_proj.weight": (3, 4),
        f"{layer}mlp.up_proj.weight": (3, 4),
        f"{layer}mlp.down_proj.weight": (4, 3),
        "lm_head.weight": (5, 4),
    }
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def half_published(seed):
    return published(seed, torch.bfloat16)


def packed(file, head=True):
    """What `weights` should hold in the end."""
    at, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    out = {
        name: tensor.float()
        for name, tensor in file.items()
        if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        and (head or name != "lm_head.weight")
    }
    for kind in ("weight", "bias"):
        parts = [file[f"{at}{part}_proj.{kind}"].float() for part in "qkv"]
        out[f"{at}qkv_proj.{kind}"] = torch.cat(parts)
    parts = [file[f"{mlp}{part}_proj.weight"].float() for part in ("gate", "up")]
    out[f"{mlp}gate_up_proj.weight"] = torch.cat(parts)
    return out


def loaded(load_weights, file, wanted):
    """The result, and what the tensors hold that were allocated before the call."""
    weights = {name: torch.full_like(tensor, -1.0) for name, tensor in wanted.items()}
    held = dict(weights)  # as a layer holds them
    once = (pair for pair in file.items())
    unused = load_weights(weights, once, SIZES)
    return unused, held


@pytest.mark.task("ch05.2")
def test_worked_example_of_load(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch05.2")
def test_every_tensor(check):
    """q, k, v and gate, up go into their rows of the packed tensors, the rest to its own name"""
    file = check.inputs(published)
    wanted = packed(file)
    check.probe((set(), wanted), lambda load: loaded(load, file, wanted))


@pytest.mark.task("ch05.2")
def test_any_order(check):
    """tensors may come in any order"""
    file = check.inputs(published, seed=1)
    wanted = packed(file)
    backwards = dict(reversed(file.items()))
    check.probe((set(), wanted), lambda load: loaded(load, backwards, wanted))


@pytest.mark.task("ch05.2")
def test_other_dtype(check):
    """a bfloat16 file fills float32 weights"""
    file = check.inputs(half_published)
    wanted = packed(file)
    check.probe((set(), wanted), lambda load: loaded(load, file, wanted))


@pytest.mark.task("ch05.2")
def test_tied_head(check):
    """a model with tied embeddings has no place for a head: its name is returned, no more"""
    file = check.inputs(published, seed=2)
    wanted = packed(file, head=False)
    check.probe(({"lm_head.weight"}, wanted), lambda load: loaded(load, file, wanted))


@pytest.mark.task("ch05.2")
def test_names_without_a_place(check):
    """names that the model does not know are returned, with or without a part or a dot"""
    file = check.inputs(published, seed=3)
    extra = {
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.2.self_attn.k_proj.weight": torch.ones(4, 4),
        "model.layers.1.mlp.up_proj.bias": torch.ones(3),
        "scale": torch.ones(1),
    }
    wanted = packed(file)
    check.probe((set(extra), wanted), lambda load: loaded(load, {**extra, **file, **extra}, wanted))


@pytest.mark.task("ch05.2")
def test_only_some(check):
    """tensors that no file names stay as they were"""
    file = check.inputs(published, seed=4)
    name = "model.layers.1.self_attn.k_proj.weight"
    wanted = {key: torch.full_like(tensor, -1.0) for key, tensor in packed(file).items()}
    wanted["model.layers.1.self_attn.qkv_proj.weight"][6:10] = file[name]
    check.probe((set(), wanted), lambda load: loaded(load, {name: file[name]}, wanted))
