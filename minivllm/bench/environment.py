"""What a number was measured on: the stamp of results, and the facts that `doctor` prints.

Owns the look at the machine. Every fact is optional: what cannot be read is None, never an
exception. torch is imported only where a device is asked about.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minivllm

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "xxhash")
MORE_PACKAGES = ("huggingface_hub", "gguf", "jinja2", "flash-attn")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def stamp(device: torch.device) -> dict[str, Any]:
    """The environment of a measurement, small enough to stand in every result."""
    import torch

    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "minivllm": version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "packages": package_versions(PACKAGES),
        "device": str(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        facts["cuda"] = torch.version.cuda
    return facts


def version() -> str:
    """The version, and in a git checkout the commit it stands on."""
    root = Path(minivllm.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return minivllm.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--match", "v*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of another user
        return minivllm.__version__
    return f"{minivllm.__version__} ({done.stdout.strip()})"


def package_versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions, read without importing anything; None: not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def cpu_name() -> str | None:
    """The processor's own name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # no /proc on macOS and Windows
    return platform.processor() or platform.machine() or None


def usable_cores() -> int | None:
    """Cores that this process may run on; a container often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory() -> dict[str, int | None]:
    """Bytes of memory: total, available, and the container's limit where it has one."""
    found: dict[str, int | None] = {"total": None, "available": None, "limit": None}
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found["total"], found["available"] = values.get("MemTotal"), values.get("MemAvailable")
    except (OSError, ValueError, IndexError):
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        # "max", or in the older layout a number near 2**63, where there is no limit
        if text.isdigit() and int(text) < 2**60:
            found["limit"] = int(text)
    return found


def python_name() -> str:
    """Implementation and version, and whether a virtual environment is active."""
    inside = " in a virtual environment" if sys.prefix != sys.base_prefix else ""
    return f"{platform.python_implementation()} {platform.python_version()}{inside}"
