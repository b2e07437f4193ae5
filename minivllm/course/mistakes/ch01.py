"""Chapter 01, the decode loop and sampling: what people write instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from minivllm.course.mistakes import mistake


def best(model: Callable[[torch.Tensor], torch.Tensor], tokens: list[int]) -> int:
    return int(model(torch.tensor([tokens]))[0, -1].argmax())


@mistake(
    "ch01.1",
    "ignores EOS",
    "it goes on after a token of eos_ids.",
)
def ignores_eos(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(best(model, tokens))
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "end token dropped",
    "the ending token is left out of the result; it belongs to it, so that the caller sees "
    "why the text ended.",
)
def end_dropped(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        token = best(model, tokens)
        if token in eos_ids:
            break
        tokens.append(token)
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "end token of the prompt",
    "it looks for a token of eos_ids in the prompt too. There it ends nothing: only a new "
    "token can.",
)
def end_in_prompt(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(best(model, tokens))
        if any(token in eos_ids for token in tokens):
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "end token seen one call late",
    "it looks for the ending token only after the next call of the model: that call is for "
    "nothing. Look at each token as soon as it is chosen.",
)
def end_checked_late(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for step in range(max_new):
        token = best(model, tokens)
        if step and tokens[-1] in eos_ids:
            break
        tokens.append(token)
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "one token too many",
    "it makes max_new + 1 tokens; max_new=0 means none.",
    engine_visible=True,
)
def one_too_many(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    while len(tokens) - len(ids) <= max_new:
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "prompt counted in max_new",
    "max_new is taken as the length of the whole text; it is the number of new tokens.",
    engine_visible=True,
)
def length_of_all(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    while len(tokens) < max_new:
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "first row",
    "the first row of the logits is about the second token of the prompt; the last row is "
    "about the next one.",
    engine_visible=True,
)
def first_row(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(int(model(torch.tensor([tokens]))[0, 0].argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "last row but one",
    "the last row but one is about the token that is already there; logits[0, -1] is about "
    "the next one.",
    engine_visible=True,
)
def row_before(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        logits = model(torch.tensor([tokens]))[0]
        tokens.append(int(logits[max(len(tokens) - 2, 0)].argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "last token only",
    "after the first call it passes only the newest token. The model remembers nothing: it "
    "needs the whole text (until the KV cache of lesson 06).",
    engine_visible=True,
)
def last_token_only(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for step in range(max_new):
        tokens.append(best(model, tokens[-1:] if step else tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "prompt only",
    "it passes the prompt again and again and never what it has written, so every new token "
    "is the same.",
    engine_visible=True,
)
def prompt_only(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(best(model, list(ids)))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "ids grown",
    "it appends the new tokens to the caller's list. Copy it first: tokens = list(ids).",
)
def grows_ids(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens, start = ids, len(ids)
    for _ in range(max_new):
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens[start:]


@mistake(
    "ch01.1",
    "ids grown, nothing left",
    "it appends to the caller's list: tokens and ids are the same list, so nothing lies behind "
    "the prompt. Copy it first: tokens = list(ids).",
)
def grows_ids_empty(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = ids
    for _ in range(max_new):
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "ids grown and returned",
    "it appends to the caller's list and returns it, prompt and all. Copy it first, and return "
    "only what is new.",
)
def grows_ids_whole(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = ids
    for _ in range(max_new):
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens


@mistake(
    "ch01.1",
    "no batch axis",
    "the model gets a list of tokens, [T]. It wants a batch of one: torch.tensor([tokens]), which "
    "is [1, T].",
)
def no_batch_axis(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "tensors in the list",
    "the result is a list of tensors; a list of ints is asked for. int(...) or .item() makes one "
    "of a tensor with a single number.",
)
def tensors_listed(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(model(torch.tensor([[int(token) for token in tokens]]))[0, -1].argmax())
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "last token from the start",
    "it passes only the last token, of the prompt too. The model remembers nothing: it needs the "
    "whole text at every call.",
    engine_visible=True,
)
def last_token_always(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(best(model, tokens[-1:]))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "prompt returned",
    "the result begins with the prompt; only new tokens are asked for.",
    engine_visible=True,
)
def with_prompt(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens


@mistake(
    "ch01.1",
    "two calls a token",
    "it calls the model twice for each token: the right text for twice the work.",
)
def called_twice(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens = list(ids)
    for _ in range(max_new):
        best(model, tokens)
        tokens.append(best(model, tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


@mistake(
    "ch01.1",
    "endless loop",
    "the loop never ends: the list whose length it looks at does not grow. Append each new token "
    "to the list that you measure and pass to the model.",
    engine_visible=True,
)
def never_ends(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    tokens, new = list(ids), []
    while len(tokens) - len(ids) < max_new:
        new.append(best(model, tokens))
        if new[-1] in eos_ids:
            break
    return new


# The right answer in pieces, so that each mistake below changes one of them.


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    x = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    return x / temperature.clamp(min=1e-5)[:, None]


def cut_k(x: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    k = torch.where(top_k > 0, top_k, x.shape[-1]).clamp(max=x.shape[-1]).long()
    kth = x.sort(dim=-1, descending=True).values.gather(-1, k[:, None] - 1)
    return x.masked_fill(x < kth, -math.inf)


def crossing(x: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """How many tokens of each row stay below top_p."""
    mass = x.sort(dim=-1, descending=True).values.double().softmax(dim=-1).cumsum(dim=-1)
    return (mass < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=x.shape[-1] - 1)


def cut_p(x: torch.Tensor, top_p: torch.Tensor, more: int = 0) -> torch.Tensor:
    """Cut at the crossing token, or `more` places behind it."""
    place = (crossing(x, top_p) + more).clamp(min=0, max=x.shape[-1] - 1)
    pth = x.sort(dim=-1, descending=True).values.gather(-1, place)
    return x.masked_fill((x < pth) & (top_p < 1)[:, None], -math.inf)


def one_hot(logits: torch.Tensor) -> torch.Tensor:
    token = logits.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, token, 1.0)


def single(
    probs: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Rows for which one token is wanted get it."""
    x = cut_k(scaled(logits, temperature), top_k)
    alone = (temperature < 1e-5) | (top_k == 1) | ((top_p < 1) & (crossing(x, top_p)[:, 0] == 0))
    return torch.where(alone[:, None], one_hot(logits), probs)


@mistake(
    "ch01.2",
    "softmax before T",
    "it takes the softmax first and divides the probabilities by T. Normalised again they "
    "are as before: T does nothing. Divide the logits.",
    engine_visible=True,
)
def after_softmax(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_p(cut_k(scaled(logits, torch.ones_like(temperature)), top_k), top_p)
    probs = x.softmax(dim=-1) / temperature.clamp(min=1e-5)[:, None]
    probs = probs / probs.sum(dim=-1, keepdim=True)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "softmax twice",
    "it divides probabilities by T and takes a second softmax of them. Numbers between 0 and "
    "1 give an almost flat distribution; divide the logits.",
    engine_visible=True,
)
def softmax_twice(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = scaled(logits.float().softmax(dim=-1), temperature)
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "multiplied by T",
    "it multiplies by the temperature, so that a low one makes the distribution flat. Divide.",
    engine_visible=True,
)
def multiplied(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = scaled(logits, 1 / temperature.clamp(min=1e-5))
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "filters before T",
    "it cuts by top-p on the distribution at temperature 1 and scales afterwards. The sum "
    "that top_p means is that of the scaled distribution.",
    engine_visible=True,
)
def temperature_last(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_p(cut_k(scaled(logits, torch.ones_like(temperature)), top_k), top_p)
    probs = scaled(x, temperature).softmax(dim=-1)
    warm = temperature.where(temperature < 1e-5, 1.0)
    return single(probs, logits, warm, top_k, top_p)


@mistake(
    "ch01.2",
    "first row's temperature",
    "all rows get the temperature of the first one. Each row has its own: temperature[:, None].",
)
def one_temperature(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = scaled(logits, temperature[:1].expand_as(temperature))
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "divides by T = 0",
    "at temperature 0 it divides by zero, and the row becomes NaN. That row is greedy: "
    "probability 1 for the best token.",
)
def greedy_divides(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    x = cut_k(x / temperature[:, None], top_k)
    probs = cut_p(x.nan_to_num(), top_p).softmax(dim=-1)
    probs = torch.where((temperature == 0)[:, None], math.nan, probs)
    return torch.where((top_k == 1)[:, None], one_hot(logits), probs)


@mistake(
    "ch01.2",
    "greedy shares a tie",
    "of two best tokens each gets one half at temperature 0. Greedy means one token, the "
    "lowest id.",
)
def greedy_shares(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    probs = cut_p(cut_k(scaled(logits, temperature), top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature.clamp(min=1e-3), top_k, top_p)


@mistake(
    "ch01.2",
    "top_k = 1 shares a tie",
    "of two best tokens each gets one half at top_k = 1. One token is wanted: the lowest id.",
)
def top_k_1_shares(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    probs = cut_p(cut_k(scaled(logits, temperature), top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k.where(top_k != 1, 0), top_p)


@mistake(
    "ch01.2",
    "top-p shares a tie of the best",
    "where the best token alone reaches top_p and another one equals it, both are kept. One "
    "is enough: the lowest id.",
)
def top_p_shares(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    probs = cut_p(cut_k(scaled(logits, temperature), top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, torch.ones_like(top_p))


@mistake(
    "ch01.2",
    "one more than top_k",
    "it keeps top_k + 1 tokens: the k-th largest is at index k - 1.",
    engine_visible=True,
)
def k_plus_one(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), torch.where(top_k > 1, top_k + 1, top_k))
    probs = cut_p(x, top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "largest top_k for all",
    "it cuts all rows at one top_k, the largest of them. Each row has its own.",
)
def largest_k(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    k = torch.where(top_k > 1, top_k.max().expand_as(top_k), top_k)
    probs = cut_p(cut_k(scaled(logits, temperature), k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "top_k above V",
    "it fails where top_k is larger than the vocabulary; that keeps everything.",
)
def k_too_large(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    k = torch.where(top_k > 0, top_k, logits.shape[-1])
    x = scaled(logits, temperature)
    kth = x.sort(dim=-1, descending=True).values.gather(-1, k[:, None] - 1)
    probs = cut_p(x.masked_fill(x < kth, -math.inf), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "ties at top_k cut",
    "it keeps exactly top_k tokens by their place in the sorted row. Which of several equal "
    "ones survives is then an accident of sorting: keep what equals the k-th.",
)
def k_ties_cut(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = scaled(logits, temperature)
    rank = x.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    x = x.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], -math.inf)
    probs = cut_p(x, top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "ties at top_p cut",
    "it cuts by the place in the sorted row: of equal tokens at the crossing some are kept "
    "and some are not. Keep what equals the crossing token.",
)
def p_ties_cut(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    rank = x.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    x = x.masked_fill((rank > crossing(x, top_p)) & (top_p < 1)[:, None], -math.inf)
    probs = x.softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "drops the crossing token",
    "top-p keeps only the tokens whose sum stays below top_p. The one that crosses it must "
    "stay, or the kept mass is less than top_p.",
    engine_visible=True,
)
def drops_crossing(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    probs = cut_p(x, top_p, more=-1).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "greedy only at exactly 0",
    "only a temperature of exactly 0 is taken as greedy. Below 1e-5 is greedy too.",
)
def greedy_at_zero(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    warm = temperature.where(temperature == 0, temperature.clamp(min=1e-5))
    x = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    x = x / temperature.where(temperature > 0, 1.0)[:, None]
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1)
    return single(probs, logits, warm, top_k, top_p)


@mistake(
    "ch01.2",
    "drops the crossing token, sum <= p",
    "it keeps the tokens whose running sum is at most top_p. The one that crosses it must stay, "
    "or the kept mass is less than top_p.",
)
def drops_crossing_by_place(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    ranked, ids = x.sort(dim=-1, descending=True, stable=True)
    cut = ranked.softmax(dim=-1).cumsum(dim=-1) > top_p[:, None]
    cut[:, 0] = False
    cut &= (top_p < 1)[:, None]
    x = x.masked_fill(torch.zeros_like(cut).scatter(-1, ids, cut), -math.inf)
    return single(x.softmax(dim=-1), logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "drops the crossing token, keeps none",
    "it keeps the tokens whose running sum is at most top_p. Where the best token alone is above "
    "it, nothing is left and the row is NaN. The token that crosses top_p must stay.",
)
def keeps_none(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    ranked, ids = x.sort(dim=-1, descending=True, stable=True)
    cut = ranked.softmax(dim=-1).cumsum(dim=-1) > top_p[:, None]
    cut &= (top_p < 1)[:, None]
    x = x.masked_fill(torch.zeros_like(cut).scatter(-1, ids, cut), -math.inf)
    return single(x.softmax(dim=-1), logits, temperature, top_k, torch.ones_like(top_p))


@mistake(
    "ch01.2",
    "top-p of the model's own probabilities",
    "it takes the sum for top-p from the softmax of the logits as they came, before temperature "
    "and top-k. Scale first, cut by top-k, and take the sum of what is left.",
)
def p_of_unscaled(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    plain = scaled(logits, torch.ones_like(temperature))
    kept = cut_k(plain, top_k).isfinite() & cut_p(plain, top_p).isfinite()
    probs = scaled(logits, temperature).masked_fill(~kept, -math.inf).softmax(dim=-1)
    warm = temperature.where(temperature < 1e-5, 1.0)
    probs = single(probs, logits, warm, torch.zeros_like(top_k), top_p)
    return torch.where((top_k == 1)[:, None], one_hot(logits), probs)


@mistake(
    "ch01.2",
    "subtracted in bfloat16",
    "a .float() is missing: the row's largest is subtracted in the dtype of the logits, and "
    "bfloat16 has three digits. Upcast first.",
)
def subtracted_in_half(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=1e-5)[:, None]
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "row by row in bfloat16",
    "a .float() is missing: each row is cut and its softmax taken in the dtype of the logits, and "
    "bfloat16 has three digits. Upcast the logits before anything else.",
)
def rows_in_half(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(logits.shape)
    for i, row in enumerate(logits):
        # Numbers, not tensors: a float times bfloat16 stays bfloat16.
        t, k, p = temperature[i].item(), int(top_k[i]), top_p[i].item()
        if t < 1e-5 or k == 1:
            out[i, row.argmax()] = 1.0
            continue
        x = (row - row.max()) / t
        if k:
            x = x.masked_fill(x < x.sort(descending=True).values[min(k, len(x)) - 1], -math.inf)
        if p < 1:
            ranked = x.sort(descending=True).values
            below = int((ranked.softmax(-1).cumsum(-1) < p).sum())
            if below == 0:
                out[i, row.argmax()] = 1.0
                continue
            x = x.masked_fill(x < ranked[min(below, len(x) - 1)], -math.inf)
        out[i] = x.softmax(-1)
    return out


@mistake(
    "ch01.2",
    "one behind the crossing",
    "top-p keeps one token too many: it ends with the one that crosses top_p.",
    engine_visible=True,
)
def one_behind_crossing(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    probs = cut_p(x, top_p, more=1).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "top-p of the whole row",
    "top-p counts the mass of the whole row, cut tokens included. Top-k comes first, and "
    "top_p is a part of what it leaves.",
    engine_visible=True,
)
def p_of_everything(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = scaled(logits, temperature)
    kept = cut_k(x, top_k).isfinite() & cut_p(x, top_p).isfinite()
    probs = x.masked_fill(~kept, -math.inf).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "top_p as a threshold",
    "it cuts every token whose own probability is below 1 - top_p (that is nearer to min-p). "
    "top_p is about the running sum.",
    engine_visible=True,
)
def p_as_threshold(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    low = x.softmax(dim=-1) < 1 - top_p[:, None]
    low &= x < x.amax(dim=-1, keepdim=True)
    probs = x.masked_fill(low, -math.inf).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "top_p = 1 cuts",
    "with top_p = 1 it still cuts the tokens behind the place where the sum rounds to 1. 1 "
    "means off.",
)
def p_cuts_at_one(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_k(scaled(logits, temperature), top_k)
    pth = x.sort(dim=-1, descending=True).values.gather(-1, crossing(x, top_p))
    probs = x.masked_fill(x < pth, -math.inf).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "left in sorted order",
    "the result is in the order of the sorted row, not of the token ids.",
    engine_visible=True,
)
def unsorted(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_p(cut_k(scaled(logits, temperature), top_k), top_p)
    probs = single(x.softmax(dim=-1), logits, temperature, top_k, top_p)
    return probs.sort(dim=-1, descending=True).values


@mistake(
    "ch01.2",
    "not normalised again",
    "the tokens that are left keep their old probabilities, so the row's sum is below 1.",
)
def not_normalised(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = scaled(logits, temperature)
    kept = cut_p(cut_k(x, top_k), top_p).isfinite()
    probs = x.softmax(dim=-1) * kept
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "logits cut to 0",
    "what is cut gets the logit 0 in place of minus infinity; exp(0) is 1, so it comes back.",
    engine_visible=True,
)
def cut_to_zero(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_p(cut_k(scaled(logits, temperature), top_k), top_p)
    probs = torch.where(x.isfinite(), x, 0.0).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "cut to a small number",
    "what is cut gets a tiny probability in place of exactly 0, and will be drawn one day.",
)
def cut_to_small(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = cut_p(cut_k(scaled(logits, temperature), top_k), top_p)
    probs = single(x.softmax(dim=-1), logits, temperature, top_k, top_p)
    return probs.clamp(min=1e-10)


@mistake(
    "ch01.2",
    "divided before subtracting",
    "it divides the logits by T before the row's largest is subtracted. Large numbers have "
    "lost the digits that tell neighbours apart.",
)
def divided_first(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = logits.float() / temperature.clamp(min=1e-5)[:, None]
    x = x - x.amax(dim=-1, keepdim=True)
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "computed in bfloat16",
    "it computes in the dtype of the logits; bfloat16 has three digits. Upcast first.",
)
def half_precision(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    x = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=1e-5)[:, None].to(
        logits.dtype
    )
    probs = cut_p(cut_k(x, top_k), top_p).softmax(dim=-1).float()
    return single(probs, logits, temperature, top_k, top_p)


@mistake(
    "ch01.2",
    "result in the logits' dtype",
    "the result is cast back to the dtype of the logits; float32 is asked for.",
)
def dtype_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    probs = cut_p(cut_k(scaled(logits, temperature), top_k), top_p).softmax(dim=-1)
    return single(probs, logits, temperature, top_k, top_p).to(logits.dtype)


@mistake(
    "ch01.2",
    "logits changed",
    "it changes the caller's logits in place.",
)
def in_place(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    probs = cut_p(cut_k(scaled(logits, temperature), top_k), top_p).softmax(dim=-1)
    probs = single(probs, logits, temperature, top_k, top_p)
    logits.masked_fill_(probs == 0, -math.inf)
    return probs


@mistake(
    "ch01.3",
    "best token always",
    "it takes the most likely token whatever u is.",
    engine_visible=True,
)
def ignores_u(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return probs.argmax(dim=-1)


@mistake(
    "ch01.3",
    "line laid from the right",
    "it counts the sums from the last token down, so that a small u gives a late token.",
    engine_visible=True,
)
def reversed_line(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().flip(-1).cumsum(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1)
    last = (running < running[:, -1:]).sum(dim=-1)
    return probs.shape[-1] - 1 - torch.minimum(token, last)


@mistake(
    "ch01.3",
    "sorted line",
    "it lays out the tokens by probability and gives their places there. The line is in the "
    "order of the ids.",
    engine_visible=True,
)
def sorted_line(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    values, ids = probs.double().sort(dim=-1, descending=True, stable=True)
    running = values.cumsum(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1)
    last = (running < running[:, -1:]).sum(dim=-1)
    return ids.gather(-1, torch.minimum(token, last)[:, None])[:, 0]


@mistake(
    "ch01.3",
    "one token later",
    "the result is one id too high.",
    engine_visible=True,
)
def one_later(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1) + 1
    return token.clamp(max=probs.shape[-1] - 1)


@mistake(
    "ch01.3",
    "one token earlier",
    "the result is one id too low: the token at which the sum exceeds u is the one that is meant.",
    engine_visible=True,
)
def one_earlier(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1) - 1
    return token.clamp(min=0)


@mistake(
    "ch01.3",
    "reaches in place of exceeds",
    "it takes the token at which the running sum reaches u. Then u = 0 gives a token of "
    "probability 0, and an edge goes to the token before it.",
)
def reaches(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    return (running < u[:, None] * running[:, -1:]).sum(dim=-1)


@mistake(
    "ch01.3",
    "runs off the end",
    "at u = 1 no running sum exceeds u, and the result is V, which is no token.",
)
def runs_off(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    return (running <= u[:, None] * running[:, -1:]).sum(dim=-1)


@mistake(
    "ch01.3",
    "clamped to the last id",
    "at u = 1 it gives the last id even if that has probability 0. The last token that can "
    "be drawn is meant.",
)
def clamped_end(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1)
    return token.clamp(max=probs.shape[-1] - 1)


@mistake(
    "ch01.3",
    "first id at u = 1",
    "argmax of a row in which nothing is true is 0: at u = 1 no running sum exceeds u, and the "
    "first id comes out. The last token that can be drawn is meant.",
)
def zero_at_one(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    return (running > u[:, None] * running[:, -1:]).int().argmax(dim=-1)


@mistake(
    "ch01.3",
    "first id beyond the sum",
    "argmax of a row in which nothing is true is 0: where u is beyond the row's sum, the first id "
    "comes out. u means that part of the sum, and at u = 1 the last token that can be drawn.",
)
def zero_beyond(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return (probs.double().cumsum(dim=-1) > u[:, None]).int().argmax(dim=-1)


@mistake(
    "ch01.3",
    "runs off the end, sum taken as 1",
    "it compares u with the running sums as they are, and where u is beyond them the result is V, "
    "which is no token. u means that part of the row's sum.",
)
def runs_off_plain(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return (probs.double().cumsum(dim=-1) <= u[:, None]).sum(dim=-1)


@mistake(
    "ch01.3",
    "clamped to the last id, sum taken as 1",
    "it compares u with the running sums as they are, and where u is beyond them it gives the "
    "last id, even one of probability 0. u means that part of the row's sum.",
)
def clamped_plain(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    token = (probs.double().cumsum(dim=-1) <= u[:, None]).sum(dim=-1)
    return token.clamp(max=probs.shape[-1] - 1)


@mistake(
    "ch01.3",
    "reaches in place of exceeds, by argmax",
    "it takes the token at which the running sum reaches u (>=), of the sums as they are. An edge "
    "goes to the token before it, u = 0 gives a token of probability 0, and where u is beyond "
    "the sum, argmax gives id 0.",
)
def reaches_plain(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return (probs.double().cumsum(dim=-1) >= u[:, None]).int().argmax(dim=-1)


@mistake(
    "ch01.3",
    "searchsorted without right=True",
    "searchsorted finds the first running sum that reaches u; with right=True it finds the first "
    "that exceeds it. So an edge goes to the token before it, and u = 0 gives a token of "
    "probability 0. And the sums are taken as they are: where u is beyond them the result is V, "
    "which is no token.",
)
def searched_left(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(probs.cumsum(dim=-1), u[:, None])[:, 0]


@mistake(
    "ch01.3",
    "sum taken as 1",
    "it compares u with the running sums as they are. Where a row's sum is below 1, the last "
    "token gets what is missing.",
)
def sum_ignored(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    token = (running <= u[:, None]).sum(dim=-1)
    return torch.minimum(token, (running < running[:, -1:]).sum(dim=-1))


@mistake(
    "ch01.3",
    "one u for all rows",
    "all rows use the u of the first one.",
)
def one_u(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    token = (running <= u[0] * running[:, -1:]).sum(dim=-1)
    return torch.minimum(token, (running < running[:, -1:]).sum(dim=-1))


@mistake(
    "ch01.3",
    "every token alike",
    "it takes u * V: every token is then as likely as any other.",
    engine_visible=True,
)
def flat(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return (u * probs.shape[-1]).long().clamp(max=probs.shape[-1] - 1)


@mistake(
    "ch01.3",
    "result [B, 1]",
    "the result has the shape [B, 1]; [B] is asked for.",
)
def column(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1)
    return torch.minimum(token, (running < running[:, -1:]).sum(dim=-1))[:, None]


@mistake(
    "ch01.3",
    "probabilities changed",
    "it turns the caller's probabilities into running sums.",
)
def cumsum_in_place(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.cumsum_(dim=-1)
    token = (running <= u[:, None] * running[:, -1:]).sum(dim=-1)
    return torch.minimum(token, (running < running[:, -1:]).sum(dim=-1))
