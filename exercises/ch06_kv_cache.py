"""Chapter 06: KV cache (40 minutes, 7 points).

Keep each token's keys and values, so that a new token costs one token's work, not the whole
text's.
Replace each `raise NotImplementedError`, then run:
    pytest exercises/test_ch06_kv_cache.py
Stuck? minivllm course hint ch06.1
To look around: minivllm course try ch06
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


class KVCache:
    """Keys and values of one sequence, layer by layer: [L, max_len, Hkv, D] each."""

    def __init__(
        self,
        num_layers: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_len = max_len
        shape = (num_layers, max_len, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_layers  # tokens stored; a layer is ahead of the next within a step

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys and values of new tokens behind those that this layer has.

        layer: an index; k, v: [T, Hkv, D], T >= 1. self.lengths[layer] grows by T; other layers
        keep theirs: within a step, layer 0 is ahead of layer 1. Raises ValueError if more than
        self.max_len tokens would be stored; the cache is then as it was.

        The numbers are copied into self.k and self.v, which __init__ has reserved: nothing is
        allocated here, and what the caller does with k and v later changes nothing. Only the new
        tokens are written: old ones are not copied, and what lies behind the new ones stays.

        Example:
            >>> cache = KVCache(num_layers=1, max_len=8, num_kv_heads=1, head_dim=2)
            >>> cache.append(0, torch.full((3, 1, 2), 7.0), torch.zeros(3, 1, 2))
            >>> cache.append(0, torch.full((1, 1, 2), 5.0), torch.ones(1, 1, 2))
            >>> k, v = cache.view(0)
            >>> k[:, 0, 0], v[:, 0, 0]
            (tensor([7., 7., 7., 5.]), tensor([0., 0., 0., 1.]))
        """
        # TODO(ch06.1): store k and v behind what this layer has, then move its length
        raise NotImplementedError("ch06.1: KVCache.append")

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that this layer has stored: (k, v), each [length, Hkv, D].

        They are slices of self.k and self.v, no copies, and end with the last stored token: what
        lies behind is left from an earlier request, or was never written.
        """
        # TODO(ch06.1): show what this layer has, without a copy
        raise NotImplementedError("ch06.1: KVCache.view")

    def reset(self) -> None:
        """Forget the sequence. Nothing is erased: what lies behind a length is never read."""
        self.lengths = [0] * len(self.lengths)


def generate_cached(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    """Continue `ids` greedily, as generate_naive does, with every token computed once.

    model: model(ids [1, T] int64, cache) gives logits [1, T, V], a row for each of these T tokens.
    It takes them as following what the cache holds, and appends their keys and values itself.
    cache: may hold the rest of an earlier request: cache.reset() empties it. Nothing else need be
    done with it here, it is only passed on.
    ids: the prompt, at least one token; left as it was. max_new: 0 or more. eos_ids: token ids.
    Returns the new tokens, a list of int: at most max_new; after a token of eos_ids nothing
    follows, and that token is part of the result.

    The model is called once for the whole prompt, then once for each new token that another one
    follows: the last one is never computed. With max_new=0 there is no call at all.

    Example:
        >>> class StubCache:  # this model needs none
        ...     def reset(self):
        ...         pass
        >>> calls = []
        >>> def counting_model(ids, cache):  # after 3 comes 4, after 9 comes 0
        ...     assert ids.dim() == 2 and ids.shape[0] == 1, "ids must be [1, T]"
        ...     calls.append(ids.tolist())
        ...     if len(calls) == 50:
        ...         raise TimeoutError("called 50 times for 3 tokens: does the loop end?")
        ...     return torch.nn.functional.one_hot((ids + 1) % 10, 10).float()
        >>> generate_cached(counting_model, StubCache(), [3, 4], max_new=3)
        [5, 6, 7]
        >>> calls
        [[[3, 4]], [[5]], [[6]]]
    """
    # TODO(ch06.2): empty the cache; the prompt in one call, then each new token alone
    raise NotImplementedError("ch06.2: generate_cached")
