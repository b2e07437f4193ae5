"""The ladder file: one bar a stage, kept from chapter to chapter, and a GPU's recorded run.

Owns `work/ladder.json`, which lessons write and git ignores, and the reading of
`lessons/data/stages.json`, which `python -m minivllm.bench.record_stages` writes and git keeps.
Bars of another machine, model or workload never stand side by side. Never measures or draws.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.bench.result import BenchResult
from minivllm.stages.build import NAMES

# What must be equal for two bars to be comparable.
SAME = ("cpu", "cores", "threads", "device", "gpu")
RECORD = Path("lessons") / "data" / "stages.json"
RUNGS = Path("lessons") / "data" / "ladder.json"  # of `minivllm bench ladder`


def add(*results: BenchResult, path: Path | None = None) -> dict[str, float]:
    """Put bars on the ladder (a stage's newest replaces its older) and return `bars`."""
    path = path or _ladder_path()
    kept = {_key(entry): entry for entry in _read(path)}
    for result in results:
        entry = {"stage": result.settings["stage"], **result.to_dict()}
        kept[_key(entry)] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(kept.values()), indent=1) + "\n", encoding="utf-8")
    return bars(results[-1], path)


def bars(like: BenchResult, path: Path | None = None) -> dict[str, float]:
    """Stage -> output tokens a second, in the course's order, of `like`'s machine and workload."""
    entries = _read(path or _ladder_path())
    found = {
        entry["stage"]: entry["output_tokens_per_s"]
        for entry in entries
        if entry["workload"] == like.workload
        and entry["settings"].get("model") == like.settings["model"]
        and all(entry["environment"].get(key) == like.environment.get(key) for key in SAME)
    }
    return {name: found[name] for name in NAMES if name in found}


def recorded(path: Path | None = None) -> dict[str, Any]:
    """The GPU's record (see `record_stages`); empty where there is none."""
    if path is None:
        from minivllm.course.root import find_root

        path = find_root() / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def recorded_bars(stages: Sequence[str] = NAMES, path: Path | None = None) -> dict[str, float]:
    """Stage -> output tokens a second of the GPU's record; empty where there is none."""
    runs = {run["settings"]["stage"]: run for run in recorded(path).get("runs", [])}
    return {name: runs[name]["output_tokens_per_s"] for name in stages if name in runs}


def recorded_rungs(path: Path | None = None) -> dict[str, float]:
    """Rung -> output tokens a second of `bench ladder` on a GPU, in its order; empty without."""
    if path is None:
        from minivllm.course.root import find_root

        path = find_root() / RUNGS
    runs = recorded(path).get("runs", [])
    return {run["settings"]["stage"]: run["output_tokens_per_s"] for run in runs}


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["stage"], entry["workload"], str(entry["settings"].get("model"))


def _ladder_path() -> Path:
    from minivllm.course.root import find_root, work_folder

    return work_folder(find_root()) / "ladder.json"


def _read(path: Path) -> list[dict[str, Any]]:
    """The entries of a ladder file; none where it is missing or was cut short while writing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
