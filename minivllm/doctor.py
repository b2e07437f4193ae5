"""`minivllm doctor`: this machine in one block that can be pasted into a question.

Owns what is asked and how it is written. It must work where nothing else does: every part that
fails becomes a line with the reason, and what needs torch comes last. Serves chapter 00.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.bench import environment
from minivllm.hub import BUILT_IN, cache_dir, is_model_dir, resolve_model

Facts = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Run the command; always 0, since a broken machine is a result too."""
    if args.json:
        print(json.dumps(collect(), indent=2, ensure_ascii=False))
        return 0
    for title, part in PARTS.items():  # part by part: importing torch can take long, or fail
        print(render(title, _guarded(part)), flush=True)
    return 0


def collect() -> dict[str, Facts]:
    """Everything, by part."""
    return {title: _guarded(part) for title, part in PARTS.items()}


def render(title: str, facts: Facts) -> str:
    """One part as aligned lines."""
    lines = [title]
    for name, value in facts.items():
        values = value if isinstance(value, list) else [value]
        for i, item in enumerate(values or ["none"]):
            first, rest = f"  {name if i == 0 else '':<18}", " " * 22
            lines += textwrap.wrap(
                f"{first}{item}",
                100,
                subsequent_indent=rest,
                break_long_words=False,  # paths are copied
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _guarded(part: Callable[[], Facts]) -> Facts:
    try:
        return part()
    # Whatever is broken on this machine is what the reader of the block must see.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _system() -> Facts:
    memory = environment.memory()
    limit = memory["limit"]
    variables = [
        f"{name}={os.environ[name]}"
        for name in (*environment.THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "MINIVLLM_CACHE")
        if name in os.environ
    ]
    return {
        "minivllm": environment.version(),
        "python": environment.python_name(),
        "platform": platform.platform(),
        "cpu": environment.cpu_name(),
        "cores": f"{environment.usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{_gib(memory['available'])} available of {_gib(memory['total'])}"
        + (f", limited to {_gib(limit)}" if limit else ""),
        "variables": variables,
    }


def _packages() -> Facts:
    found = environment.package_versions((*environment.PACKAGES, *environment.MORE_PACKAGES))
    return {name: version or "not installed" for name, version in found.items()}


def _models() -> Facts:
    cache = cache_dir()
    names = [p.name for p in sorted(cache.iterdir())] if cache.is_dir() else []
    found = [
        f"{name}, {_gib(_bytes(cache / name))}"
        + ("" if is_model_dir(cache / name) else ", incomplete")
        for name in names
        if (cache / name).is_dir() and not name.startswith(".")
    ]
    return {"cache": _short(cache), "fetched": found, "bundled": _bundled(), "hub": _hub_models()}


def _bundled() -> list[str]:
    found = []
    for name in BUILT_IN:
        if name != "smollm2":  # resolving that one would download it
            with contextlib.suppress(ValueError):  # not in this version
                found.append(f"{name}, {_gib(_bytes(resolve_model(name)))}")
    return found


def _hub_models() -> list[str]:
    """Names in the cache that the hub's own library shares between programs."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def _engine() -> Facts:
    import torch

    from minivllm.engine.device import capability, pick_device, pick_dtype
    from minivllm.ops.backends import select_backend

    device = pick_device("auto")
    backend, reason = select_backend("auto", device.type, capability(device))
    facts: Facts = {
        "torch threads": torch.get_num_threads(),
        "CUDA": f"built for {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build",
        "GPUs": [_gpu(torch.cuda, i) for i in range(torch.cuda.device_count())],
        "device": f"{device} (chosen by auto)",
    }
    if device.type == "cpu":
        facts["dtype"] = "float32 (16-bit batches are slower on a CPU)"
    else:
        dtype = str(pick_dtype("auto", "bfloat16", device)).removeprefix("torch.")
        facts["dtype"] = f"the checkpoint's; bfloat16 runs as {dtype}"
    facts["attention backend"] = f"{backend}: {reason}"
    facts["backends"] = _backends(device.type, capability(device))
    return facts


def _backends(device: str, capability: tuple[int, int] | None) -> list[str]:
    """Each name that `attention_backend` takes, with what keeps it from running here."""
    from minivllm.ops.backends import BACKENDS, why_not

    reasons = {name: why_not(name, device, capability) for name in BACKENDS}
    return [f"{name}: {'yes' if why is None else f'no, it {why}'}" for name, why in reasons.items()]


def _gpu(cuda: Any, index: int) -> str:
    major, minor = cuda.get_device_capability(index)
    try:
        free, total = cuda.mem_get_info(index)
        memory = f"{_gib(free)} free of {_gib(total)}"
    except RuntimeError as error:  # a GPU that is full or in exclusive use refuses even this
        memory = f"memory unknown: {' '.join(str(error).split())}"
    return f"{index}: {cuda.get_device_name(index)}, sm_{major}{minor}, {memory}"


PARTS: dict[str, Callable[[], Facts]] = {
    "system": _system,
    "packages": _packages,
    "models": _models,
    "engine": _engine,
}


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _gib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.0f} MiB"


def _short(path: Path) -> str:
    """The path without the user's name: the block is for pasting in public."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)
