"""The choice of device and dtype, and errors that name what there is."""

from __future__ import annotations

import pytest
import torch

from minivllm.engine.device import on_device, pick_device, pick_dtype

CPU = torch.device("cpu")


def test_dtype() -> None:
    assert pick_dtype("auto", "bfloat16", CPU) == torch.float32
    assert pick_dtype("bfloat16", "float32", CPU) == torch.bfloat16
    assert pick_dtype("float16", "bfloat16", CPU) == torch.float16


def test_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for capability, expected in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert pick_dtype("auto", "bfloat16", cuda) == expected
        assert pick_dtype("auto", "float16", cuda) == torch.float16
        assert pick_dtype("auto", "float32", cuda) == torch.float32


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    with pytest.raises(ValueError, match="device='cuda' was asked for"):
        pick_device("cuda")
    for name in ("gpu", "mps", "tpu:0", ""):
        with pytest.raises(ValueError, match=f"device='{name}' is (unknown|not supported)"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 3)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device='cuda:4': torch sees 4 CUDA devices"):
        pick_device("cuda:4")


def test_a_cpu_has_no_current_gpu_to_change() -> None:
    with on_device(CPU), on_device(CPU):
        assert on_device(CPU).idx == -1
    assert on_device(torch.device("cuda", 2)).idx == 2
