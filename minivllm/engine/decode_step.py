"""One decode step as a function of the device state: from six numbers a row to sampled tokens.

Owns the order of a decode launch. Never waits for the device and has one shape per batch size: it
is what a CUDA graph captures as it stands. Each operation on a row's numbers is a launch of 1 to
2 us (H200), so all that the host knows comes from there. Lessons 09 and 15.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.engine.device_state import DeviceState
from minivllm.models.decoder import CausalLM
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.table import Ops


def decode_step(
    model: CausalLM,
    ops: Ops,
    state: DeviceState,
    kv: tuple[torch.Tensor, torch.Tensor | None],
    numbers: torch.Tensor,
    *,
    table_width: int,
    flags: tuple[bool, bool],
    logits_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token a row. Returns sampled ids [B] and raw logits [B, V].

    kv: the cache and, where it has 8 bits, its scales; numbers: [6, B] int64, see `pack_decode`;
    table_width: columns of the block table to read; flags: `state.flags(slots)`; logits_out:
    [B, V], where a captured step is to leave its logits.
    """
    slots, column, position, block, cache_slot, context = numbers
    # At most one block is new, the newest token's: writing it always is cheaper than asking.
    state.block_table[slots, column] = block.int()
    batch = AttentionBatch(
        positions=position,
        slot_mapping=cache_slot,
        block_tables=state.block_table[slots, :table_width],
        context_lens=context.int(),
        cu_seqlens_q=None,
        max_seqlen_q=0,
        num_decode=len(slots),
    )
    hidden = model(state.last_token[slots], batch, *kv)
    logits = model.logits(hidden, logits_out)
    all_greedy, any_filter = flags
    sampling = replace(state.sampling.select(slots), all_greedy=all_greedy, any_filter=any_filter)
    sampling.position.copy_(context)  # that of the token to come
    sampled = ops.sample(logits, sampling)
    state.last_token[slots] = sampled
    return sampled, logits
