"""One decode step as a function of the device state: from slot numbers to sampled tokens.

Owns the order of a decode launch. Takes nothing from the host but the slots and the block that each
new token falls into, never waits for the device and has one shape per batch size: it is what a
CUDA graph captures as it stands. Lessons 09 and 15.
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
    slots: torch.Tensor,
    blocks: torch.Tensor,
    *,
    table_width: int,
    flags: tuple[bool, bool],
    logits_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token a row and move the rows on. Returns sampled ids [B] and raw logits [B, V].

    kv: the cache and, where it has 8 bits, its scales; slots: [B] int64, `state.pad_slot` for pad
    rows; blocks: [B] int64, the block of each row's newest token; table_width: columns of the block
    table to read; flags: `state.flags(slots)`; logits_out: [B, V], where a captured step is to
    leave its logits.
    """
    block_size = kv[0].shape[3]
    live = slots != state.pad_slot  # pads store nothing, read nothing and stay where they are
    position = state.position[slots]
    # At most one block is new, the newest token's: writing it always is cheaper than asking.
    state.block_table[slots, position // block_size] = blocks.int()
    batch = AttentionBatch(
        positions=position,
        slot_mapping=torch.where(live, blocks * block_size + position % block_size, -1),
        block_tables=state.block_table[slots, :table_width],
        context_lens=torch.where(live, position + 1, 0).int(),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=slots.device),
        max_seqlen_q=0,
        num_decode=slots.shape[0],
    )
    hidden = model(state.last_token[slots], batch, *kv)
    logits = model.logits(hidden, logits_out)
    all_greedy, any_filter = flags
    sampling = replace(
        state.sampling.select(slots),
        position=position + 1,
        all_greedy=all_greedy,
        any_filter=any_filter,
    )
    sampled = ops.sample(logits, sampling)
    state.last_token[slots] = sampled
    state.position[slots] = torch.where(live, position + 1, 0)
    return sampled, logits
