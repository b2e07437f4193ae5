"""The list for the table of operations, and the message where no kernel can run."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
from kernel_tools import INTERPRETED

from minivllm.ops import compose, table
from minivllm.ops.table import Ops


def entries():
    pytest.importorskip("triton")
    from minivllm.kernels.entries import TRITON_FUSED

    return TRITON_FUSED


def test_every_entry_is_one_of_the_table():
    names = {fused.entry for fused in entries()}
    assert names <= set(Ops.__dataclass_fields__)
    for fused in entries():
        assert fused.replaces <= set(table.UNITS)


def test_signatures_are_those_of_the_torch_forms():
    forms = {
        **table.UNITS,
        "linear": table.linear.linear,
        "pack_weight": table.linear.pack_weight,
        "decode_attention": table.UNITS["paged_decode"],
        "prefill_attention": compose.compose_prefill_attention(table.UNITS["attention"]),
        "qk_norm_rope_store": compose.compose_qk_norm_rope_store(*[table.UNITS["rms_norm"]] * 3),
    }
    for fused in entries():
        parameters = inspect.signature(forms[fused.entry]).parameters.values()
        expected = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]  # the scales
        got = list(inspect.signature(fused.function).parameters)
        assert got[: len(expected)] == expected, fused.entry
        assert set(got[len(expected) :]) <= {"k_scale", "v_scale"}


def test_without_a_gpu_the_message_says_what_to_do():
    if INTERPRETED:
        pytest.skip("the interpreter needs no GPU")
    entries()
    from minivllm.kernels.norms import rms_norm

    with pytest.raises(RuntimeError, match=r"rms_norm needs CUDA tensors.*TRITON_INTERPRET=1"):
        rms_norm(torch.randn(2, 16), torch.ones(16), 1e-6)


def test_no_kernel_is_compiled_again_for_another_width_of_the_block_table():
    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    entries()
    from triton.runtime.jit import JITFunction

    from minivllm.kernels import decode, decode_fp8, prefill

    found = [
        parameter.do_not_specialize
        for module in (decode, decode_fp8, prefill)
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction)
        for parameter in kernel.params
        if parameter.name == "stride_table"
    ]
    assert len(found) >= 3 and all(found)


def test_the_table_does_not_import_triton():
    code = "import sys, minivllm.ops.table; assert 'triton' not in sys.modules"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
