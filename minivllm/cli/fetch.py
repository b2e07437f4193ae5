"""`minivllm fetch`: a model onto this machine, its directory on stdout.

Owns the choice between the two ways of fetching; `minivllm.fetch` and `minivllm.hub` do the work.
Serves chapter 00.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from minivllm.hub import is_model_dir, resolve_model, snapshot


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    print(fetch(args.name, args.dest, args.source))
    return 0


def fetch(name: str, dest: str | None, source: str) -> Path:
    """The directory of the model, complete. Raises ValueError in one line."""
    if name == "smollm2":
        from minivllm.fetch import fetch_smollm2

        return fetch_smollm2(dest, source)
    if source != "auto":
        raise ValueError(f"--source {source} is for smollm2; {name!r} has one source")
    if name == "tiny" and dest is not None:
        raise ValueError("model 'tiny' is part of the package; it needs no fetching")
    if dest is None or "/" not in name or Path(name).exists():
        return resolve_model(name)
    target = Path(dest).expanduser()
    if target.exists() and not is_model_dir(target) and any(target.iterdir()):
        raise ValueError(f"{target} exists but is not a complete model; remove it to fetch again")
    return snapshot(name, local_dir=target)
