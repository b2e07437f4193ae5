"""The op table: what runs where, and how a user's own parts take their places."""

from __future__ import annotations

import pytest

from minivllm.ops import attention, compiled, flash_attn, kv_fp8, sdpa
from minivllm.ops.table import (
    BACKENDS,
    ENGINE_PARTS,
    UNITS,
    Ops,
    Part,
    build_ops,
    wrap_parts,
)


def nothing(*args, **kwargs):
    return None


def test_units_are_the_entries_without_parts() -> None:
    ops = build_ops("torch", {})
    for name in ("rope_table", "rms_norm", "add_rms_norm", "silu_mul", "sample"):
        assert getattr(ops, name) is UNITS[name]
    assert ops.decode_attention is attention.paged_decode


def test_fused_forms_of_a_backend() -> None:
    ops = build_ops("sdpa", {})
    assert ops.prefill_attention is sdpa.prefill_attention
    assert ops.decode_attention is sdpa.paged_decode
    ops = build_ops("compile", {})
    assert ops.rms_norm is compiled.rms_norm and ops.sample is UNITS["sample"]
    assert ops.decode_attention is attention.paged_decode  # loops over rows: stays plain


def test_flash_attn_takes_the_attention_and_triton_the_rest() -> None:
    pytest.importorskip("triton")
    ops, ours = build_ops("flash_attn", {}), build_ops("triton", {})
    for entry in Ops.__dataclass_fields__:
        theirs = getattr(flash_attn, entry.replace("decode_attention", "paged_decode"), None)
        assert getattr(ops, entry) is (theirs or getattr(ours, entry)), entry


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("unit", sorted(UNITS))
def test_a_given_unit_disables_the_fused_forms_that_replace_it(unit: str, backend: str) -> None:
    ops, plain = build_ops(backend, wrap_parts({unit: nothing})), build_ops(backend, {})
    for fused in BACKENDS[backend]():
        kept = getattr(ops, fused.entry) is fused.function
        assert kept == (unit not in fused.replaces)
    if hasattr(ops, unit):
        assert getattr(ops, unit).target is nothing
        assert getattr(plain, unit) is not nothing


def test_a_given_unit_reaches_the_compositions() -> None:
    calls = []

    def recording(name):
        def part(*args, **kwargs):
            calls.append(name)
            return args[0]

        return part

    names = ("rms_norm", "apply_rope", "store_kv", "attention")
    ops = build_ops("torch", wrap_parts({name: recording(name) for name in names}))
    ops.qk_norm_rope_store("q", "k", "v", "wq", "wk", 1e-6, 0, 0, 0, 0, 0, 0)
    assert calls == ["rms_norm", "rms_norm", "apply_rope", "apply_rope", "store_kv"]
    calls.clear()
    ops.qk_norm_rope_store("q", "k", "v", None, None, 1e-6, 0, 0, 0, 0, 0, 0)
    assert calls == ["apply_rope", "apply_rope", "store_kv"]  # no norm where the model has none


def test_unknown_part_has_a_hint() -> None:
    with pytest.raises(ValueError, match="'rmsnorm'.*did you mean 'rms_norm'"):
        wrap_parts({"rmsnorm": nothing})
    with pytest.raises(ValueError, match="'zzz'; known: .*rms_norm.*scheduler"):
        wrap_parts({"zzz": nothing})


def test_part_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"parts\['rms_norm'\] must be callable, got int"):
        wrap_parts({"rms_norm": 3})


def test_parts_count_their_calls() -> None:
    parts = wrap_parts({"rms_norm": nothing, **dict.fromkeys(ENGINE_PARTS, dict)})
    assert {name: part.calls for name, part in parts.items()} == dict.fromkeys(parts, 0)
    parts["rms_norm"](1, 2, x=3)
    parts["rms_norm"]()
    assert isinstance(parts["rms_norm"], Part) and parts["rms_norm"].calls == 2
    assert parts["scheduler"]() == {} and parts["block_manager"].calls == 0
    assert wrap_parts(None) == {} == wrap_parts({})


def test_an_8_bit_cache_takes_8_bit_forms_and_no_part_of_the_users() -> None:
    for backend in ("torch", "sdpa", "compile"):
        ops = build_ops(backend, {}, "fp8")
        assert ops.decode_attention is kv_fp8.paged_decode
        assert ops.prefill_attention is kv_fp8.prefill_attention
    with pytest.raises(ValueError, match=r"cannot run with your own \['attention'\]"):
        build_ops("torch", wrap_parts({"attention": nothing}), "fp8")
