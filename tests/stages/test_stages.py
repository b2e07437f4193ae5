"""The stages, the engine and transformers write the same, and count what they say they count."""

from __future__ import annotations

import pytest
import torch

from minivllm import stages
from minivllm.stages.build import Stage
from tiny_models import FAMILIES, assert_greedy

PROMPTS = [[5, 6, 7, 8, 9], [1], list(range(40)), [300, 2, 300, 2, 17, 45, 3]]
COUNTS = [9, 14, 6, 1]
# What a checkpoint may bring beyond the usual: an own head, biases everywhere, scaled rotation.
VARIANTS = {
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "one KV head": ("qwen2", {"num_key_value_heads": 1}),
}


def build(name, path, **options):
    if name == "engine":
        options.setdefault("num_kvcache_blocks", 32)
    return stages.build(name, str(path), device="cpu", max_len=64, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_write_the_same(family, tiny_model, reference):
    path = tiny_model(family)
    results = [build(name, path).generate(PROMPTS, COUNTS) for name in stages.NAMES]
    assert results[0] == results[1] == results[2]
    assert [len(result) for result in results[0]] == COUNTS
    assert_greedy(reference(path), PROMPTS, results[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, tiny_model, reference):
    family, config = VARIANTS[name]
    path = tiny_model(family, **config)
    results = [build(stage, path).generate(PROMPTS, 5) for stage in stages.NAMES]
    assert results[0] == results[1] == results[2]
    assert_greedy(reference(path), PROMPTS, results[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_decoder_and_engine(family, tiny_model, reference):
    """The tie between the layer that students write and the engine's."""
    from minivllm.ops.sampling import sample

    path, prompt, count = tiny_model(family), PROMPTS[0], 6
    seen = []

    def recording(logits, *args, **kwargs):
        seen.append(logits.clone())
        return sample(logits, *args, **kwargs)

    engine = build("engine", path, parts={"sample": recording})
    (text,) = engine.generate([prompt], count)
    ids = torch.tensor([prompt + text[:-1]])
    plain = build("s1_naive", path).model(ids)[0]
    whole = reference(path).logits(ids[0].tolist())
    torch.testing.assert_close(plain, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain[len(prompt) - 1 :], torch.cat(seen), rtol=1e-4, atol=1e-4)


def test_cached_logits_are_the_whole_ones(tiny_model):
    stage = build("s2_kv", tiny_model("qwen3"))
    ids = torch.tensor([PROMPTS[2]])
    whole = stage.model(ids)
    pieces = [stage.model(piece, stage.cache) for piece in ids.split([17, 1, 1, 21], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_tokens_computed(tiny_model):
    path = tiny_model("llama")
    length, count = 7, 5
    prompt = [[3, 1, 4, 1, 5, 9, 2]]
    computed = {}
    for name in stages.NAMES:
        stage = build(name, path)
        stage.generate(prompt, count)
        computed[name] = stage.tokens_computed
    assert computed["s1_naive"] == count * length + count * (count - 1) // 2
    assert computed["s2_kv"] == computed["engine"] == length + count - 1


def test_kv_bytes_are_those_of_the_tensors(tiny_model):
    path = tiny_model("qwen3")
    naive, cached, engine = (build(name, path) for name in stages.NAMES)
    assert naive.kv_bytes == naive.kv_bytes_used == 0
    c = cached.model.config
    assert cached.kv_bytes == 64 * c.kv_bytes_per_token(4)
    assert cached.kv_bytes == sum(
        t.untyped_storage().nbytes() for t in (cached.cache.k, cached.cache.v)
    )
    cached.generate([[1, 2, 3]], 4)
    assert cached.kv_bytes_used == 6 * c.kv_bytes_per_token(4)  # the last token is not computed
    assert cached.kv_bytes == 64 * c.kv_bytes_per_token(4)
    pool = engine.llm.engine.runner.kv_cache
    assert engine.kv_bytes == pool.untyped_storage().nbytes() == 32 * 16 * c.kv_bytes_per_token(4)


def test_end_tokens(tiny_model):
    path = tiny_model("qwen2")
    free = build("s1_naive", path).generate(PROMPTS[:1], 8)[0]
    end = free[4]
    expected = free[: free.index(end) + 1]
    for name in stages.NAMES:
        assert build(name, path).generate(PROMPTS[:1], 8, [end]) == [expected]


def test_sampled_texts(tiny_model):
    """Both loops draw the same; a seed, a temperature and each filter matter; greedy is greedy."""
    path = tiny_model("qwen3")
    naive, cached = build("s1_naive", path), build("s2_kv", path)
    plain = {"temperature": 0.9, "seed": 1}
    texts = [naive.sample(PROMPTS, COUNTS, **plain)]
    assert cached.sample(PROMPTS, COUNTS, **plain) == texts[0]
    for change in ({"seed": 2}, {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.3}):
        texts.append(naive.sample(PROMPTS, COUNTS, **{**plain, **change}))
    assert len({str(text) for text in texts}) == len(texts)
    assert naive.sample(PROMPTS, COUNTS, temperature=0) == naive.generate(PROMPTS, COUNTS)


def test_one_stage_serves_request_after_request(tiny_model):
    stage = build("s2_kv", tiny_model("mistral"))
    first = stage.generate(PROMPTS, COUNTS)
    assert stage.generate(PROMPTS, COUNTS) == first


def test_other_dtype_and_random_weights(tiny_model):
    stage = build("s2_kv", tiny_model("qwen3"), dtype="bfloat16", load_format="dummy")
    assert stage.cache.k.dtype == torch.bfloat16
    assert stage.model(torch.tensor([[1, 2]])).dtype == torch.float32
    assert stage.generate([[1, 2]], 3) == build(
        "s2_kv", tiny_model("qwen3"), dtype="bfloat16", load_format="dummy"
    ).generate([[1, 2]], 3)


def test_too_long(tiny_model):
    for name in ("s1_naive", "s2_kv"):
        with pytest.raises(ValueError, match="max_len=64"):
            build(name, tiny_model("qwen3")).generate([list(range(60))], 10)


def test_unfilled_weights_are_named(tiny_model):
    def lazy(weights, tensors, sizes):
        return {name for name, _ in tensors}

    with pytest.raises(ValueError, match=r"unfilled.*embed_tokens"):
        Stage("s1_naive", tiny_model("qwen3"), mine={"load_weights": lazy}, device="cpu")


def test_unknown_names(tiny_model):
    with pytest.raises(ValueError, match="'s3' is unknown; one of s1_naive"):
        stages.build("s3", str(tiny_model("qwen3")))
    with pytest.raises(ValueError, match="use='theirs' is unknown"):
        stages.build("s1_naive", str(tiny_model("qwen3")), use="theirs")


def test_mine(tiny_model, monkeypatch, capsys):
    from minivllm.course import stage_units
    from minivllm.ops.norms import rms_norm
    from minivllm.stages.s2_kv import KVCache

    calls = []

    def my_norm(x, weight, eps):
        calls.append(x.shape)
        return rms_norm(x, weight, eps)

    class MyCache(KVCache):
        pass

    solved = {"rms_norm": my_norm, "KVCache": MyCache}
    monkeypatch.setattr(stage_units, "solved_units", lambda: solved)
    path = tiny_model("qwen3")
    expected = build("s1_naive", path).generate(PROMPTS, 3)
    stage = build("s2_kv", path, use="mine")
    assert (
        "s2_kv runs on your rms_norm, KVCache; the rest is the reference's"
        in capsys.readouterr().out
    )
    assert stage.generate(PROMPTS, 3) == expected
    assert calls and isinstance(stage.cache, MyCache) and stage.mine == ("rms_norm", "KVCache")
    engine = build("engine", path, use="mine")  # it has no seat for a contiguous cache
    assert engine.mine == ("rms_norm",)
    assert engine.generate(PROMPTS, 3) == expected
    monkeypatch.setattr(stage_units, "solved_units", dict)
    assert build("s1_naive", path, use="mine").mine == ()
    assert "no unit of yours passes its tests yet" in capsys.readouterr().out
