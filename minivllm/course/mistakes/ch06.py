"""Chapter 06, the KV cache: what people write instead."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from minivllm.course.mistakes import mistake
from minivllm.stages.s2_kv import KVCache


@mistake(
    "ch06.1",
    "offset off by one",
    "the new tokens are stored one place too early, over the last one. They begin at "
    "lengths[layer].",
    engine_visible=True,
)
class OneTooEarly(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        start = max(self.lengths[layer] - 1, 0)
        end = start + k.shape[0]
        if self.lengths[layer] + k.shape[0] > self.max_len:
            raise ValueError("full")
        self.k[layer, start:end] = k
        self.v[layer, start:end] = v
        self.lengths[layer] = end


@mistake(
    "ch06.1",
    "gap of one",
    "the new tokens are stored one place too late, so that a place nobody wrote lies between.",
    engine_visible=True,
)
class OneTooLate(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        start = self.lengths[layer] + (1 if self.lengths[layer] else 0)
        end = start + k.shape[0]
        if end > self.max_len:
            raise ValueError("full")
        self.k[layer, start:end] = k
        self.v[layer, start:end] = v
        self.lengths[layer] = end


@mistake(
    "ch06.1",
    "always from the start",
    "append begins at 0 each time and overwrites what was there.",
    engine_visible=True,
)
class FromStart(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if k.shape[0] > self.max_len:
            raise ValueError("full")
        self.k[layer, : k.shape[0]] = k
        self.v[layer, : k.shape[0]] = v
        self.lengths[layer] = k.shape[0]


@mistake(
    "ch06.1",
    "one length for all layers",
    "it reads and moves the length of layer 0 whatever the layer. Each layer has its own: "
    "within a step they differ.",
    engine_visible=True,
)
class OneLength(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        start, end = self.lengths[0], self.lengths[0] + k.shape[0]
        if end > self.max_len:
            raise ValueError("full")
        self.k[layer, start:end] = k
        self.v[layer, start:end] = v
        self.lengths[0] = end

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer, : self.lengths[0]], self.v[layer, : self.lengths[0]]


@mistake(
    "ch06.1",
    "length not moved",
    "the numbers are stored and the length stays 0, so nothing is ever seen.",
    engine_visible=True,
)
class LengthStays(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        before = self.lengths[layer]
        super().append(layer, k, v)
        self.lengths[layer] = before


@mistake(
    "ch06.1",
    "view of everything",
    "view shows the whole reserved length, with what an earlier request left there. Cut it at "
    "lengths[layer].",
)
class WholeView(KVCache):
    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer], self.v[layer]


@mistake(
    "ch06.1",
    "last token unseen",
    "view ends one token too early: the new token must see itself.",
    engine_visible=True,
)
class ViewTooShort(KVCache):
    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = max(self.lengths[layer] - 1, 0)
        return self.k[layer, :end], self.v[layer, :end]


@mistake(
    "ch06.1",
    "keys for values",
    "keys come where the values should: look in append and in view.",
    engine_visible=True,
)
class KeysTwice(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().append(layer, k, k)


@mistake(
    "ch06.1",
    "view copies",
    "view returns copies. A copy of the whole cache for every token is the work that the "
    "cache is there to save: return slices.",
)
class ViewCopies(KVCache):
    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().view(layer)
        return k.clone(), v.clone()


@mistake(
    "ch06.1",
    "grown by concatenation",
    "each append makes a longer tensor and copies all of the old one into it. The memory is "
    "reserved in __init__: write into it.",
)
class Concatenated(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        old_k, old_v = self.view(layer)
        joined_k, joined_v = torch.cat([old_k, k]), torch.cat([old_v, v])
        if joined_k.shape[0] > self.max_len:
            raise ValueError("full")
        self.grown = {**getattr(self, "grown", {}), layer: (joined_k, joined_v)}
        self.lengths[layer] = joined_k.shape[0]

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.lengths[layer]:
            return super().view(layer)
        return getattr(self, "grown", {})[layer]


@mistake(
    "ch06.1",
    "row written anew",
    "append makes the layer's whole row anew, old tokens and all, and copies it back. Write the "
    "new tokens alone, into the slice behind the old ones.",
)
class RowRewritten(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        start = self.lengths[layer]
        end = start + k.shape[0]
        if end > self.max_len:
            raise ValueError("full")
        self.k[layer] = torch.cat([self.k[layer, :start], k, self.k[layer, end:]])
        self.v[layer] = torch.cat([self.v[layer, :start], v, self.v[layer, end:]])
        self.lengths[layer] = end


@mistake(
    "ch06.1",
    "rest erased",
    "append sets everything behind the new tokens to zero. Nothing reads it: that is work for "
    "the whole reserved length at every token.",
)
class RestErased(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().append(layer, k, v)
        self.k[layer, self.lengths[layer] :] = 0
        self.v[layer, self.lengths[layer] :] = 0


@mistake(
    "ch06.1",
    "reset allocates",
    "reset makes new memory. What __init__ has reserved serves every request: reset is given, "
    "leave it as it is.",
)
class ResetAllocates(KVCache):
    def reset(self) -> None:
        self.k, self.v = torch.zeros_like(self.k), torch.zeros_like(self.v)
        super().reset()


@mistake(
    "ch06.1",
    "all lengths moved",
    "append moves the lengths of all layers. The others do not have the new tokens yet: move "
    "lengths[layer] alone.",
    engine_visible=True,
)
class AllLengths(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().append(layer, k, v)
        self.lengths = [self.lengths[layer]] * len(self.lengths)


@mistake(
    "ch06.1",
    "first tensors kept",
    "the first k and v are kept as they are, not copied: they change when the caller changes them.",
)
class Aliased(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if not self.lengths[layer]:
            self.first = {**getattr(self, "first", {}), layer: (k, v)}
        super().append(layer, k, v)

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().view(layer)
        for mine, other in zip((k, v), getattr(self, "first", {}).get(layer, ())):
            mine[: other.shape[0]] = other
        return k, v


@mistake(
    "ch06.1",
    "oldest dropped when full",
    "where there is no room the oldest tokens are dropped without a word. The model would go "
    "on and read nonsense: raise ValueError.",
)
class Sliding(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        extra = self.lengths[layer] + k.shape[0] - self.max_len
        if extra > 0:
            old_k, old_v = (view[extra:].clone() for view in self.view(layer))
            self.lengths[layer] = 0
            super().append(layer, old_k, old_v)
        super().append(layer, k, v)


@mistake(
    "ch06.1",
    "length moved before the check",
    "the length is moved before it is known that the tokens fit, so the error leaves the "
    "cache longer than what it holds.",
)
class CheckedLate(KVCache):
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        start = self.lengths[layer]
        self.lengths[layer] = start + k.shape[0]
        if self.lengths[layer] > self.max_len:
            raise ValueError("full")
        self.k[layer, start : self.lengths[layer]] = k
        self.v[layer, start : self.lengths[layer]] = v


def best(model: Callable[..., torch.Tensor], step: list[int], cache: KVCache) -> int:
    return int(model(torch.tensor([step]), cache)[0, -1].argmax())


@mistake(
    "ch06.2",
    "stale second request",
    "the cache is not emptied, so the second request reads the first one's keys and values.",
    engine_visible=True,
)
def not_reset(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "hidden recompute",
    "it empties the cache and computes the whole text again for every token: the right "
    "tokens, and all the work that the cache should save.",
)
def recompute(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        cache.reset()
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = [*ids, *new]
    return new


@mistake(
    "ch06.2",
    "whole text appended again",
    "each step passes the whole text to a cache that holds most of it already: every token is "
    "stored several times.",
    engine_visible=True,
)
def appended_twice(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = [*ids, *new]
    return new


@mistake(
    "ch06.2",
    "last prompt token twice",
    "the first decode step passes the last token of the prompt again; it is in the cache. "
    "Pass the token just chosen.",
    engine_visible=True,
)
def one_behind(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = [*ids, *new][-2:-1]
    return new


@mistake(
    "ch06.2",
    "prompt token by token",
    "the prompt goes in one token a call. The result is right, but prefill is one call: that "
    "is what makes it fast.",
)
def slow_prefill(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)[-1:]
    for token in ids[:-1] if max_new else ():
        model(torch.tensor([[token]]), cache)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "last token computed",
    "it calls the model once more after the last token, for a result that nobody reads.",
)
def one_call_more(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    if new:
        model(torch.tensor([new[-1:]]), cache)
    return new


@mistake(
    "ch06.2",
    "ignores EOS",
    "it goes on after a token of eos_ids.",
)
def ignores_eos(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "end token dropped",
    "the ending token is left out of the result; it belongs to it, so that the caller sees "
    "why the text ended.",
)
def end_dropped(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        token = best(model, step, cache)
        if token in eos_ids:
            break
        new.append(token)
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "end token of the prompt",
    "it looks for a token of eos_ids in the prompt too. There it ends nothing: only a new "
    "token can.",
)
def end_in_prompt(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if any(token in eos_ids for token in (*ids, *new)):
            break
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "one token too many",
    "it makes max_new + 1 tokens; max_new=0 means none.",
    engine_visible=True,
)
def one_too_many(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) <= max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "first row",
    "the first row of the logits is about the second token of the prompt; the last row is "
    "about the next one.",
    engine_visible=True,
)
def first_row(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        logits = model(torch.tensor([step]), cache)
        new.append(int(logits[0, 0].argmax()))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "ids grown",
    "it appends the new tokens to the caller's list.",
)
def grows_ids(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        ids.append(new[-1])
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return new


@mistake(
    "ch06.2",
    "prompt returned",
    "the result begins with the prompt; only new tokens are asked for.",
    engine_visible=True,
)
def with_prompt(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step = list(ids)
    while len(new) < max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return [*ids, *new]


@mistake(
    "ch06.2",
    "endless loop",
    "the loop never ends: it looks at the length of the prompt, which does not grow. Count the "
    "new tokens.",
    engine_visible=True,
)
def never_ends(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    new: list[int] = []
    step, length = list(ids), len(ids)
    while length < len(ids) + max_new:
        new.append(best(model, step, cache))
        if new[-1] in eos_ids:
            break
        step = new[-1:]
    return new
