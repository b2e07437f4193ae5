"""The list of Triton forms for `ops/table.py`: which entry each one fills, and what it replaces.

Owns the list alone. Import it late, where the backend is chosen: it imports triton, and that takes
TRITON_INTERPRET as it then stands. Lesson 13.
"""

from __future__ import annotations

from minivllm.kernels.activations import silu_mul
from minivllm.kernels.decode import paged_decode
from minivllm.kernels.linear import linear, prepare_weight
from minivllm.kernels.norms import add_rms_norm, rms_norm
from minivllm.kernels.prefill import prefill_attention
from minivllm.kernels.qkv import qk_norm_rope_store
from minivllm.kernels.sampling import sample
from minivllm.ops.table import Fused

TRITON_FUSED: tuple[Fused, ...] = (
    Fused("rms_norm", rms_norm, frozenset({"rms_norm"})),
    Fused("add_rms_norm", add_rms_norm, frozenset({"add_rms_norm"})),
    Fused("silu_mul", silu_mul, frozenset({"silu_mul"})),
    Fused("linear", linear, frozenset()),
    Fused("pack_weight", prepare_weight, frozenset()),
    Fused(
        "qk_norm_rope_store", qk_norm_rope_store, frozenset({"rms_norm", "apply_rope", "store_kv"})
    ),
    Fused("prefill_attention", prefill_attention, frozenset({"attention"})),
    Fused("decode_attention", paged_decode, frozenset({"paged_decode"})),
    Fused("sample", sample, frozenset({"sample"})),
)
