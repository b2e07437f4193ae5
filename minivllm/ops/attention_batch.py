"""What attention needs to know about a step, as one explicit argument.

Owns the description of the rows: where each sequence's tokens, slots and blocks are. The runner
builds it, every layer reads it, nobody keeps it after the step. Lessons 07 to 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Metadata of one launch. Rows are ordered decode first; `num_decode` splits them.

    | field | shape | meaning |
    |---|---|---|
    | positions | [T] int64 | position of each token in its sequence |
    | slot_mapping | [T] int64 | where each token's K and V are stored; -1: nowhere (pad) |
    | block_tables | [B, M] int32 | block ids of each row; behind its context, never read |
    | context_lens | [B] int32 | tokens of each row once this step's are stored; 0 is a pad row |
    | cu_seqlens_q | [B - num_decode + 1] int32 | bounds of the prefill rows' tokens, if any |

    The first `num_decode` tokens belong to decode rows, one each; `cu_seqlens_q` starts at 0 with
    the token behind them.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int
    num_decode: int
