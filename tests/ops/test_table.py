"""The op table: what runs where, and how a user's own parts take their places."""

from __future__ import annotations

import pytest

from minivllm.ops import attention, kv_fp8, sdpa
from minivllm.ops.table import (
    BACKENDS,
    ENGINE_PARTS,
    PLANNED_BACKENDS,
    UNITS,
    Part,
    build_ops,
    check_kv_cache,
    select_backend,
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


def test_select_backend() -> None:
    assert select_backend("auto", "cpu")[0] == "sdpa"
    assert select_backend("auto", "cuda", (9, 0))[0] == "triton"
    assert select_backend("auto", "cuda", (7, 5))[0] == "triton"
    name, reason = select_backend("auto", "cuda", (7, 0))
    assert name == "torch" and "(7, 0)" in reason
    assert select_backend("sdpa", "cpu") == ("sdpa", "chosen by attention_backend")
    for device, capability in (("cpu", None), ("cuda", (9, 0)), ("cuda", (6, 1))):
        assert select_backend("torch", device, capability)[0] == "torch"
    for name in PLANNED_BACKENDS:
        with pytest.raises(ValueError, match=f"{name}.*not built yet"):
            select_backend(name, "cpu")
    with pytest.raises(ValueError, match="'flashy' is unknown; one of auto"):
        select_backend("flashy", "cpu")


def test_a_backend_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(ValueError, match="'sdpa' is for the CPU"):
        select_backend("sdpa", "cuda", (9, 0))
    with pytest.raises(ValueError, match=r"capability \(7, 5\) or higher; .* cuda \(7, 0\)"):
        select_backend("triton", "cuda", (7, 0))
    with pytest.raises(ValueError, match="needs a GPU"):
        select_backend("triton", "cpu")


def test_kv_caches_that_a_backend_cannot_read() -> None:
    for size in (1, 3, 16, 256):
        check_kv_cache("torch", size, "fp8", (7, 5))
    check_kv_cache("triton", 48, "auto", (7, 5))
    check_kv_cache("triton", 48, "fp8", (8, 9))
    with pytest.raises(ValueError, match="kvcache_block_size=24 must be a multiple of 16"):
        check_kv_cache("triton", 24, "auto", (9, 0))
    with pytest.raises(ValueError, match=r"'fp8' needs compute capability .* has \(8, 0\)"):
        check_kv_cache("triton", 16, "fp8", (8, 0))


def test_an_8_bit_cache_takes_8_bit_forms_and_no_part_of_the_users() -> None:
    for backend in ("torch", "sdpa"):
        ops = build_ops(backend, {}, "fp8")
        assert ops.decode_attention is kv_fp8.paged_decode
        assert ops.prefill_attention is kv_fp8.prefill_attention
    with pytest.raises(ValueError, match=r"cannot run with your own \['attention'\]"):
        build_ops("torch", wrap_parts({"attention": nothing}), "fp8")
