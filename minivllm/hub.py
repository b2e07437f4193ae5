"""Turns a model name into a directory on this machine.

Owns the meaning of names ("tiny", "smollm2", a path, "org/name" on the Hugging Face hub) and the
place of the cache. It never reads weights and never chooses a model class. Whatever goes wrong is
one ValueError of one line, because this is the first thing that a new user meets. Serves chapter
00.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from importlib import resources
from pathlib import Path

BUILT_IN = ("tiny", "smollm2")
# What the engine reads. Weights are named separately: a repository often holds them several times.
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_dir() -> Path:
    """Where fetched models live: $MINIVLLM_CACHE, or ~/.cache/minivllm."""
    chosen = os.environ.get("MINIVLLM_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "minivllm"


def is_model_dir(path: Path) -> bool:
    """Whether `path` holds a config, a tokenizer and every safetensors file it names."""
    if not ((path / "config.json").is_file() and (path / "tokenizer.json").is_file()):
        return False
    return all((path / name).is_file() for name in weight_files(path))


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files that belong to the model in `path`, present or not.

    With an index these are its shards and nothing else; other files beside them are not read.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """The directory of the model `name`; downloads on first use, with a note on stderr.

    A directory with a config.json is itself; "tiny" is the model inside the package; "smollm2" is
    fetched into `cache_dir()`; "org/name" comes from the hub. Raises ValueError (one line) for
    everything else, TypeError where `name` is not a path or a string.
    """
    name = os.fspath(name)
    path = Path(name).expanduser()
    if name and (path / "config.json").is_file():
        return path
    # After the check above: a local folder called "tiny" wins only when it is a model.
    if name == "tiny":
        return _tiny()
    if name == "smollm2":
        # Imported here because fetching needs gguf and is rare; it also imports this module.
        from minivllm.fetch import fetch_smollm2

        return fetch_smollm2()
    if name and path.is_dir():
        raise ValueError(f"model directory {name!r} holds no config.json")
    if name and path.exists():
        raise ValueError(f"model {name!r} is a file; give the directory that holds config.json")
    if _HUB_NAME.fullmatch(name):
        return snapshot(name)
    raise ValueError(f"model {name!r} is no directory and no known name{_hint(name)}")


def snapshot(repo: str, local_dir: Path | None = None, progress: bool = True) -> Path:
    """Directory with `repo` from the hub: config, tokenizer and safetensors only, never pickles.

    Without `local_dir` the files go to the hub library's own cache, shared with other programs,
    and a complete copy there is used when the network is away. Raises ValueError (one line).
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        # Two steps: the index among the small files says which shards are wanted.
        path = Path(snapshot_download(repo, allow_patterns=_SMALL_FILES, local_dir=local_dir))
        wanted = weight_files(path)
        if not all((path / name).is_file() for name in wanted):
            _say(f"downloading {repo} from the hub")
            snapshot_download(repo, allow_patterns=wanted, local_dir=local_dir)
    except hub_errors() as error:
        raise ValueError(
            f"model {repo!r} is not here and the hub gives none: {_reason(error)}"
        ) from error
    finally:
        if not progress:
            enable_progress_bars()
    missing = [name for name in ["config.json", *wanted] if not (path / name).is_file()]
    if missing:
        raise ValueError(f"model {repo!r} on the hub has no {missing[0]}")
    return path


def hub_reachable(repo: str, timeout: float = 5.0) -> bool:
    """Whether the hub answers for `repo` within `timeout` seconds; no retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repo, "config.json"), timeout=timeout)
    except hub_errors():
        return False
    return True


def hub_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises for network, access, missing files and malformed names.

    The errors of its HTTP client are a family of their own, not OSError.
    """
    from huggingface_hub import errors

    return (OSError, errors.HTTPError, errors.EntryNotFoundError, ValueError)


def _reason(error: Exception) -> str:
    """One line a user can act on; the library's own messages run over several."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its licence must be accepted there first (then log in with `hf auth login`)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository, or it is private"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return "it cannot be reached, and the local cache has no copy"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _tiny() -> Path:
    """The model that ships inside the package, so that it needs no network at all."""
    path = Path(str(resources.files("minivllm"))) / "tiny" / "model"
    if not (path / "config.json").is_file():
        raise ValueError("model 'tiny' is not part of this version yet; use 'smollm2'")
    return path


def _hint(name: str) -> str:
    """The end of the message for an unknown name."""
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known names are {', '.join(BUILT_IN)} and 'org/name' on the hub"


def _say(text: str) -> None:
    print(f"minivllm: {text}", file=sys.stderr, flush=True)
