"""Visible tests of chapter 06. No time is measured: calls of the model and tokens are counted."""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

VOCAB = 23


def keys_and_values(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 12, 2, 4, generator=g)  # 12 tokens, Hkv=2, D=4
    return k.to(dtype), v.to(dtype)


def half_keys_and_values(seed):
    return keys_and_values(seed, torch.float16)


def filled(KVCache, k, v, pieces, layers=1, max_len=12):
    """A cache that got the tokens of `k` and `v` in pieces, in every layer, one layer at a time."""
    cache = KVCache(layers, max_len, 2, 4, k.dtype)
    start = 0
    for count in pieces:
        for layer in range(layers):
            # Layers hold different numbers: layer 1 has twice those of layer 0, and so on.
            cache.append(
                layer,
                k[start : start + count] * (layer + 1),
                v[start : start + count] * (layer + 1),
            )
        start += count
    return cache


@pytest.mark.task("ch06.1")
def test_worked_example(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch06.1")
def test_one_piece(check):
    """what was appended is what is seen"""
    k, v = check.inputs(keys_and_values)
    check.probe((k[:5], v[:5]), lambda KVCache: filled(KVCache, k, v, [5]).view(0))


@pytest.mark.task("ch06.1")
def test_pieces(check):
    """a prompt, then token by token, to the last place"""
    k, v = check.inputs(keys_and_values, seed=1)
    check.probe((k, v), lambda KVCache: filled(KVCache, k, v, [7, 1, 1, 2, 1]).view(0))


@pytest.mark.task("ch06.1")
def test_layers(check):
    """each layer has keys, values and a length of its own"""
    k, v = check.inputs(keys_and_values, seed=2)

    def all_layers(KVCache):
        cache = filled(KVCache, k, v, [4, 1, 1], layers=3)
        return [cache.view(layer) for layer in range(3)]

    check.probe([(k[:6] * n, v[:6] * n) for n in (1, 2, 3)], all_layers)


@pytest.mark.task("ch06.1")
def test_within_a_step(check):
    """layer 0 sees the new token while layer 1 does not have it yet"""
    k, v = check.inputs(keys_and_values, seed=3)

    def ahead(KVCache):
        cache = filled(KVCache, k, v, [4], layers=2)
        cache.append(0, k[4:5], v[4:5])
        return [cache.view(0), cache.view(1), list(cache.lengths)]

    check.probe([(k[:5], v[:5]), (k[:4] * 2, v[:4] * 2), [5, 4]], ahead)


@pytest.mark.task("ch06.1")
def test_float16(check):
    """a float16 cache gives float16"""
    k, v = check.inputs(half_keys_and_values)
    check.probe((k[:6], v[:6]), lambda KVCache: filled(KVCache, k, v, [5, 1]).view(0))


@pytest.mark.task("ch06.1")
def test_second_request(check):
    """after reset nothing of the longer first request is seen"""
    k, v = check.inputs(keys_and_values, seed=4)

    def second(KVCache):
        cache = filled(KVCache, k * float("nan"), v * float("nan"), [11])
        cache.reset()
        cache.append(0, k[:3], v[:3])
        cache.append(0, k[3:4], v[3:4])
        return cache.view(0)

    check.probe((k[:4], v[:4]), second)


def same_memory(one, other):
    """Whether keys and values of two views begin at the same place in memory."""
    return [x.data_ptr() for x in one] == [x.data_ptr() for x in other]


@pytest.mark.task("ch06.1")
def test_view_is_no_copy(check):
    """view shows the memory that the cache has, it makes no other"""
    k, v = check.inputs(keys_and_values, seed=5)

    def twice(KVCache):
        cache = filled(KVCache, k, v, [4])
        return same_memory(cache.view(0), cache.view(0))

    check.holds(twice, "two views of one layer begin at the same place in memory")


@pytest.mark.task("ch06.1")
def test_nothing_is_allocated(check):
    """append writes into the memory that was reserved at the start"""
    k, v = check.inputs(keys_and_values, seed=5)

    def before_and_after(KVCache):
        cache = filled(KVCache, k, v, [4])
        before = cache.view(0)
        cache.append(0, k[4:6], v[4:6])
        return same_memory(before, cache.view(0))

    check.holds(before_and_after, "views begin at the same place before and after an append")


@pytest.mark.task("ch06.1")
def test_reset_keeps_the_memory(check):
    """reset forgets the tokens and keeps the memory: it allocates nothing"""
    k, v = check.inputs(keys_and_values, seed=5)

    def before_and_after(KVCache):
        cache = filled(KVCache, k, v, [4])
        before = cache.view(0)
        cache.reset()
        cache.append(0, k[4:6], v[4:6])
        return same_memory(before, cache.view(0))

    check.holds(before_and_after, "keys and values lie at the same place before and after reset")


@pytest.mark.task("ch06.1")
def test_only_the_new_tokens_are_written(check):
    """append writes the new tokens and leaves what lies behind them as it was"""
    k, v = check.inputs(keys_and_values, seed=9)

    def all_places(KVCache):
        cache = filled(KVCache, k, v, [12])
        whole = cache.view(0)  # shows all places, whatever happens to the length
        cache.reset()
        cache.append(0, k[6:9], v[6:9])
        cache.append(0, k[4:5], v[4:5])
        return whole

    check.probe(tuple(torch.cat([x[6:9], x[4:5], x[4:]]) for x in (k, v)), all_places)


class Largest(TorchFunctionMode):
    """Remembers the largest tensor that torch makes outside the memory of `own`."""

    def __init__(self, own):
        super().__init__()
        self.own = {x.untyped_storage().data_ptr() for x in own}
        self.numbers = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.own:
                self.numbers = max(self.numbers, x.numel())
        return made


@pytest.mark.task("ch06.1")
def test_old_tokens_are_not_copied(check):
    """append does the work of the new tokens only: it copies none of the old ones"""
    k, v = check.inputs(keys_and_values, seed=10)

    def one_more(KVCache):
        cache = filled(KVCache, k, v, [8])
        new_k, new_v = k[8:9], v[8:9]
        with Largest(cache.view(0)) as largest:
            cache.append(0, new_k, new_v)
        return largest.numbers <= new_k.numel() + new_v.numel()

    check.holds(
        one_more,
        "for one new token append makes no tensor larger than that token's keys and values",
    )


@pytest.mark.task("ch06.1")
def test_numbers_are_copied(check):
    """what the caller does with k and v after append changes nothing"""
    k, v = check.inputs(keys_and_values, seed=6)

    def later_changed(KVCache):
        mine, other = k[:5].clone(), v[:5].clone()
        cache = KVCache(1, 12, 2, 4)
        cache.append(0, mine, other)
        mine.zero_(), other.zero_()
        return cache.view(0)

    check.probe((k[:5], v[:5]), later_changed)


@pytest.mark.task("ch06.1")
def test_too_many(check):
    """more than max_len tokens are a ValueError"""
    k, v = check.inputs(keys_and_values, seed=7)
    check.raises(ValueError, lambda KVCache: filled(KVCache, k, v, [7, 1], max_len=7).view(0))


@pytest.mark.task("ch06.1")
def test_after_too_many(check):
    """after that error the cache holds what it held"""
    k, v = check.inputs(keys_and_values, seed=8)

    def refused(KVCache):
        cache = filled(KVCache, k, v, [6], max_len=8)
        with contextlib.suppress(ValueError):
            cache.append(0, k[6:9], v[6:9])
        return cache.view(0), list(cache.lengths)

    check.probe(((k[:6], v[:6]), [6]), refused)


class Cache:
    """A cache for the model below: it remembers tokens instead of keys and values."""

    def __init__(self, *tokens):
        self.tokens = list(tokens)

    def reset(self):
        self.tokens = []


class Model:
    """Logits of a made-up language in which each next token depends on all tokens before it."""

    def __init__(self):
        self.calls = []

    def __call__(self, ids, cache):
        assert ids.dim() == 2 and ids.shape[0] == 1, "ids must be [1, T]"
        assert ids.dtype == torch.int64, "ids must be int64"
        self.calls.append(ids.shape[1])
        if len(self.calls) == 50:
            raise TimeoutError("called 50 times for 9 tokens at most: does the loop end?")
        logits = torch.zeros(1, ids.shape[1], VOCAB)
        for row, token in enumerate(ids[0].tolist()):
            cache.tokens.append(token)
            logits[0, row, following(cache.tokens)] = 1.0
        return logits


def following(tokens):
    """The next token of that language."""
    return sum((i + 2) * (token + 1) for i, token in enumerate(tokens)) % VOCAB


def expected(ids, count):
    """The continuation, with nothing kept."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(ids) :]


def prompt(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (6,), generator=g).tolist()


@pytest.mark.task("ch06.2")
def test_worked_example_of_generate(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch06.2")
def test_same_tokens(check):
    """the tokens that recomputing everything would give"""
    ids = check.inputs(prompt)
    check.probe(expected(ids, 9), lambda generate: generate(Model(), Cache(), list(ids), 9))


@pytest.mark.task("ch06.2")
def test_work(check):
    """one call for the prompt, then one token a call; the last token is never computed"""
    ids = check.inputs(prompt, seed=1)

    def calls(generate):
        model = Model()
        generate(model, Cache(), list(ids), 5)
        return model.calls

    check.probe([6, 1, 1, 1, 1], calls)


@pytest.mark.task("ch06.2")
def test_used_cache(check):
    """a cache that still holds an earlier request is emptied first"""
    ids = check.inputs(prompt, seed=2)
    check.probe(expected(ids, 4), lambda generate: generate(Model(), Cache(4, 5), list(ids), 4))


@pytest.mark.task("ch06.2")
def test_two_requests(check):
    """one cache serves two requests, one after the other"""
    ids = check.inputs(prompt, seed=3)

    def twice(generate):
        cache = Cache()
        return [generate(Model(), cache, list(ids), 4), generate(Model(), cache, ids[:3], 7)]

    check.probe([expected(ids, 4), expected(ids[:3], 7)], twice)


@pytest.mark.task("ch06.2")
def test_end_token(check):
    """a token of eos_ids ends the text, is part of it, and nothing is computed after it"""
    ids = check.inputs(prompt, seed=4)
    text = expected(ids, 8)
    end = text[3]
    wanted = text[: text.index(end) + 1]

    def with_end(generate):
        model = Model()
        return generate(model, Cache(), list(ids), 8, [VOCAB, end]), model.calls

    check.probe((wanted, [6, *[1] * (len(wanted) - 1)]), with_end)


@pytest.mark.task("ch06.2")
def test_end_token_in_the_prompt(check):
    """a token of eos_ids in the prompt ends nothing"""
    ids = check.inputs(prompt, seed=5)
    ends = set(ids) - set(expected(ids, 3))
    check.probe(expected(ids, 3), lambda generate: generate(Model(), Cache(), list(ids), 3, ends))


@pytest.mark.task("ch06.2")
def test_lengths(check):
    """max_new is the most new tokens: none, one, two"""
    ids = check.inputs(prompt, seed=6)

    def lengths(generate):
        model = Model()
        texts = [generate(model, Cache(), list(ids), count) for count in (0, 1, 2)]
        return texts, model.calls

    check.probe(([expected(ids, count) for count in (0, 1, 2)], [6, 6, 1]), lengths)


@pytest.mark.task("ch06.2")
def test_prompt_stays(check):
    """ids is the caller's list and stays as it was"""
    ids = check.inputs(prompt, seed=7)

    def used_prompt(generate):
        mine = list(ids)
        generate(Model(), Cache(), mine, 3)
        return mine

    check.probe(ids, used_prompt)
