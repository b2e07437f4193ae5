"""`minivllm doctor`: every fact is there, and a broken machine still gets its block."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from minivllm import doctor
from minivllm.bench import environment
from minivllm.cli import main
from minivllm.ops.table import BACKENDS


def test_block_names_versions_device_and_backend(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("python", "platform", "memory", "torch", "triton", "numpy", "attention backend"):
        assert f"\n  {word}" in out
    assert torch.__version__ in out
    for title in doctor.PARTS:
        assert f"{title}\n" in out


def test_every_backend_is_named_with_its_obstacle():
    lines = doctor._backends("cpu", None)
    assert lines[:2] == ["torch: yes", "sdpa: yes"]
    assert [line.split(":")[0] for line in lines] == list(BACKENDS)
    assert lines[3].startswith("flash_attn: no, it needs a GPU of compute capability (8, 0)")
    on_a_card = doctor._backends("cuda", (7, 5))
    assert "sdpa: no, it is for the CPU, and the device is cuda" in on_a_card
    assert "triton: yes" in on_a_card
    assert on_a_card[3].endswith("the device is cuda (7, 5)")


def test_a_long_fact_goes_on_below():
    text = doctor.render("engine", {"backends": ["x: no, it " + "needs more " * 9, "y: yes"]})
    lines = text.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 100
    assert (
        text.count("more") == 9
        and lines[2].startswith(" " * 22)
        and lines[3] == " " * 20 + "y: yes"
    )


def test_json_is_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(doctor.PARTS)
    assert "reason" not in found["engine"] and ": " in found["engine"]["attention backend"]
    assert not any("error" in part for part in found.values())


def test_a_part_that_fails_is_a_line(monkeypatch, capsys):
    def broken():
        raise ImportError("libsomething.so.1:\n cannot open")

    monkeypatch.setitem(doctor.PARTS, "engine", broken)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ImportError: libsomething.so.1: cannot open" in out
    assert "python" in out


def test_no_torch_before_it_is_asked_about():
    code = (
        "import sys\nfrom minivllm import doctor\n"
        "doctor.PARTS.pop('engine')\ndoctor.collect()\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_models_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (whole / name).write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / ".half.lock").touch()
    (tmp_path / "hub" / "models--org--some-name").mkdir(parents=True)
    facts = doctor._models()
    assert facts["fetched"][0].startswith("half, ") and "incomplete" in facts["fetched"][0]
    assert facts["fetched"][-1].startswith("whole, ")
    assert "incomplete" not in facts["fetched"][-1]
    assert facts["hub"] == ["org/some-name"]


def test_gpus_are_described_even_when_one_is_busy():
    class Cuda:
        def get_device_capability(self, index):
            return (7, 5)

        def get_device_name(self, index):
            return "Some GPU"

        def mem_get_info(self, index):
            if index:
                raise RuntimeError("busy\nnow")
            return (2**30, 2**31)

    assert doctor._gpu(Cuda(), 0) == "0: Some GPU, sm_75, 1.0 GiB free of 2.0 GiB"
    assert doctor._gpu(Cuda(), 1) == "1: Some GPU, sm_75, memory unknown: busy now"


def test_paths_hide_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MINIVLLM_CACHE", raising=False)
    assert doctor._models()["cache"] == "~/.cache/minivllm"


def test_stamp():
    stamp = environment.stamp(torch.device("cpu"))
    assert stamp["device"] == "cpu" and stamp["threads"] == torch.get_num_threads()
    assert stamp["packages"]["torch"] == torch.__version__
    json.dumps(stamp)


def test_missing_package_is_none():
    assert environment.package_versions(("no-such-package-here",)) == {"no-such-package-here": None}
