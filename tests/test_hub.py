"""Model names: what each kind resolves to, and one clear line for everything else. No network."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

import minivllm.fetch
from minivllm import hub


def make_model(path: Path, *shards: str) -> Path:
    """A directory that looks complete: config, tokenizer and the named weight files."""
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", *(shards or ("model.safetensors",))):
        (path / name).write_text("{}")
    if shards:
        index = {"weight_map": {f"w{i}": name for i, name in enumerate(shards)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 200
    return text


def test_directory_is_itself(tmp_path, monkeypatch):
    model = make_model(tmp_path / "m")
    assert hub.resolve_model(str(model)) == model
    assert hub.resolve_model(model) == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model("~/m") == model


def test_directory_shaped_like_a_hub_name_wins(tmp_path, monkeypatch):
    make_model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model("org/name") == Path("org/name")


@pytest.mark.parametrize("name", ["", "./nope", "/nowhere/at/all", "a/b/c", "nope", "~/nope"])
def test_unknown_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        hub.resolve_model(name)
    text = one_line(error)
    assert repr(name) in text and "smollm2" in text


def test_close_name_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        hub.resolve_model("smolm2")


def test_directory_without_config_and_file(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ValueError, match="holds no config.json"):
        hub.resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        hub.resolve_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", [None, 3, ["smollm2"]])
def test_not_a_name(name):
    with pytest.raises(TypeError):
        hub.resolve_model(name)


def test_tiny_comes_from_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.resources, "files", lambda package: tmp_path)
    # A folder of that name that is no model does not hide the built-in one.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ValueError, match="'tiny' is not part of this version"):
        hub.resolve_model("tiny")
    model = make_model(tmp_path / "tiny" / "model")
    assert hub.resolve_model("tiny") == model


def test_smollm2_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(minivllm.fetch, "fetch_smollm2", lambda: tmp_path)
    assert hub.resolve_model("smollm2") == tmp_path


def test_cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    assert hub.cache_dir() == tmp_path
    monkeypatch.setenv("MINIVLLM_CACHE", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert hub.cache_dir() == Path("/home/someone/.cache/minivllm")


def test_is_model_dir_wants_every_shard(tmp_path):
    model = make_model(tmp_path / "m", "a.safetensors", "b.safetensors")
    assert hub.is_model_dir(model)
    (model / "b.safetensors").unlink()
    assert not hub.is_model_dir(model)
    assert not hub.is_model_dir(tmp_path / "absent")


class FakeHub:
    """Stands for snapshot_download: serves `files`, honours the patterns, records them."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder, self.files, self.patterns = folder, files, []

    def __call__(self, repo, allow_patterns, local_dir=None):
        import fnmatch

        self.patterns.append(allow_patterns)
        folder = local_dir or self.folder
        folder.mkdir(exist_ok=True, parents=True)
        for name, text in self.files.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).write_text(text)
        return str(folder)


def install(monkeypatch, tmp_path, files):
    fake = FakeHub(tmp_path / "snapshot", files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_hub_takes_index_shards_and_no_pickles(tmp_path, monkeypatch):
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    fake = install(
        monkeypatch,
        tmp_path,
        {
            "config.json": "{}",
            "tokenizer.json": "{}",
            "chat_template.jinja": "",
            "model.safetensors.index.json": index,
            "m-1.safetensors": "",
            "m-2.safetensors": "",
            "consolidated.safetensors": "",
            "pytorch_model.bin": "",
            "model.pth": "",
        },
    )
    path = hub.resolve_model("org/name")
    got = {p.name for p in path.iterdir()}
    assert got == {
        "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json",
        "m-1.safetensors", "m-2.safetensors",
    }  # fmt: skip
    hub.resolve_model("org/name")
    assert len(fake.patterns) == 3  # the second time the weights are there already


def test_hub_without_safetensors(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, {"config.json": "{}", "pytorch_model.bin": ""})
    with pytest.raises(ValueError, match=r"'org/name' on the hub has no model.safetensors"):
        hub.resolve_model("org/name")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.LocalEntryNotFoundError("long\nstory"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("HF_HUB_OFFLINE"), "cannot be reached"),
        (errors.HFValidationError("bad\nname"), "HFValidationError: bad"),
        (ConnectionError("refused\nagain"), "ConnectionError: refused"),
        (errors.HTTPError("timed out\nafter"), "HTTPError: timed out"),
    ],
)
def test_hub_failure_is_one_line(error, reason, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError) as caught:
        hub.resolve_model("org/name")
    text = one_line(caught)
    assert reason in text and "'org/name'" in text


def test_unreachable_hub_is_noticed(monkeypatch):
    def fail(*args, **kwargs):
        assert kwargs["timeout"] <= 10
        raise errors.HTTPError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    assert not hub.hub_reachable("org/name")
