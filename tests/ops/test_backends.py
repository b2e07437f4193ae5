"""Which backend runs where, and what each refuses by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from minivllm.ops.backends import check_kv_cache, check_model, select_backend, why_not
from minivllm.ops.table import BACKENDS, CAPTURABLE, CAPTURABLE_PREFILL

CAPABILITIES = [(6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch):
    """packages(name=True, ...) says which packages are there; only those named are asked for."""
    installed: dict[str, bool] = {}

    def find_spec(name: str) -> object | None:
        return object() if installed[name] else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    return lambda **names: installed.update(names)


def test_auto(packages) -> None:
    packages(flash_attn=False)
    assert select_backend("auto", "cpu") == ("sdpa", "the fastest form on a CPU")
    assert select_backend("auto", "cuda", (9, 0)) == ("triton", "this project's own kernels")
    assert select_backend("auto", "cuda", (7, 5))[0] == "triton"
    name, reason = select_backend("auto", "cuda", (7, 0))
    assert name == "torch" and "(7, 0)" in reason


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_flash_attn(packages, installed: bool, capability: tuple[int, int]) -> None:
    """auto passes over it and says why; a wish is granted where card and package are there."""
    packages(flash_attn=installed)
    name, reason = select_backend("auto", "cuda", capability)
    assert name == ("triton" if capability >= (7, 5) else "torch")
    runs = installed and capability >= (8, 0)
    assert ("flash_attn is installed and not chosen" in reason) == runs
    if runs:
        chosen = ("flash_attn", "chosen by attention_backend")
        assert select_backend("flash_attn", "cuda", capability) == chosen
        return
    missing = "needs the package flash-attn" if capability >= (8, 0) else r"capability \(8, 0\)"
    with pytest.raises(ValueError, match=f"attention_backend='flash_attn' .*{missing}"):
        select_backend("flash_attn", "cuda", capability)


def test_flash_attn_never_on_a_cpu(packages) -> None:
    packages(flash_attn=True)
    with pytest.raises(ValueError, match=r"'flash_attn' needs a GPU .*the device is cpu"):
        select_backend("flash_attn", "cpu")


def test_looking_for_the_package_does_not_import_it() -> None:
    before = set(sys.modules)
    why_not("flash_attn", "cuda", (9, 0))
    assert not {name for name in set(sys.modules) - before if name.startswith("flash_attn")}


def test_a_wish_is_granted_or_refused(packages) -> None:
    packages(flash_attn=False)
    assert select_backend("sdpa", "cpu") == ("sdpa", "chosen by attention_backend")
    for device, capability in (("cpu", None), ("cuda", (9, 0)), ("cuda", (6, 1))):
        assert select_backend("torch", device, capability)[0] == "torch"
    with pytest.raises(ValueError, match="'flashy' is unknown; one of auto, torch, sdpa"):
        select_backend("flashy", "cpu")
    with pytest.raises(ValueError, match="'sdpa' is for the CPU, and the device is cuda"):
        select_backend("sdpa", "cuda", (9, 0))
    with pytest.raises(ValueError, match=r"capability \(7, 5\) or higher; .* cuda \(7, 0\)"):
        select_backend("triton", "cuda", (7, 0))


def test_triton_on_a_cpu_is_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU .*the device is cpu"):
        select_backend("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("triton", "cpu")[0] == "triton"


def test_compile_on_a_gpu_needs_triton(packages) -> None:
    packages(triton=True)
    assert select_backend("compile", "cuda", (7, 0))[0] == "compile"
    with pytest.raises(ValueError, match=r"'compile' needs .*\(7, 0\) .*the GPU has \(6, 1\)"):
        select_backend("compile", "cuda", (6, 1))
    packages(triton=False)
    with pytest.raises(ValueError, match="'compile' needs the package triton"):
        select_backend("compile", "cuda", (9, 0))


@pytest.mark.parametrize(
    ("platform", "compiler"), [("linux", "g++"), ("darwin", "clang++"), ("win32", "cl")]
)
def test_compile_on_a_cpu_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, compiler: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("shutil.which", lambda name: None)
    match = re.escape(f"'compile' needs a C++ compiler: {compiler} is not on the PATH")
    with pytest.raises(ValueError, match=match):
        select_backend("compile", "cpu")
    monkeypatch.setattr("shutil.which", lambda name: name if name == "mine" else None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(ValueError, match=r"'compile' needs Python's headers"):
        select_backend("compile", "cpu")
    (tmp_path / "Python.h").touch()
    assert select_backend("compile", "cpu")[0] == "compile"


def test_every_backend_has_an_answer_everywhere() -> None:
    for device, capability in [("cpu", None), *(("cuda", found) for found in CAPABILITIES)]:
        reasons = {name: why_not(name, device, capability) for name in BACKENDS}
        assert reasons["torch"] is None
        assert all(reason is None or " " in reason for reason in reasons.values())
    assert set(CAPTURABLE_PREFILL) <= set(CAPTURABLE) <= set(BACKENDS)
    assert "compile" not in CAPTURABLE  # its attention and its store wait for the device


def test_kv_caches_that_a_backend_cannot_read() -> None:
    for size in (1, 3, 16, 256):
        for backend in ("torch", "sdpa", "compile"):
            check_kv_cache(backend, size, "fp8", (7, 5))
    check_kv_cache("triton", 48, "auto", (7, 5))
    check_kv_cache("triton", 48, "fp8", (8, 9))
    with pytest.raises(ValueError, match="kvcache_block_size=24 must be a multiple of 16"):
        check_kv_cache("triton", 24, "auto", (9, 0))
    with pytest.raises(ValueError, match=r"'fp8' needs compute capability .* has \(8, 0\)"):
        check_kv_cache("triton", 16, "fp8", (8, 0))


def test_what_flash_attn_cannot_read() -> None:
    for size in (256, 512):
        check_kv_cache("flash_attn", size, "auto", (8, 0))
    for size in (16, 128, 300):
        with pytest.raises(ValueError, match=f"kvcache_block_size={size} .*256 .*'flash_attn'"):
            check_kv_cache("flash_attn", size, "auto", (9, 0))
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' cannot run with .*'flash_attn'"):
        check_kv_cache("flash_attn", 256, "fp8", (9, 0))


def test_models_that_flash_attn_cannot_run() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (8, 64, 96, 128, 256):
            check_model("flash_attn", dtype, head_dim)
    with pytest.raises(ValueError, match="'flash_attn' .*float16 or bfloat16.* is float32"):
        check_model("flash_attn", torch.float32, 64)
    for head_dim in (12, 264, 288):
        with pytest.raises(ValueError, match=f"'flash_attn' .*256 .*head_dim is {head_dim}"):
            check_model("flash_attn", torch.bfloat16, head_dim)
    for name in BACKENDS.keys() - {"flash_attn"}:
        check_model(name, torch.float32, 12)
