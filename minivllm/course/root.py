"""Where the course's folders are.

Owns the search for the folder that holds `exercises/course.toml`. The package may be installed once
for a whole classroom while each student's exercises lie in their home, so the search starts where
the student is and falls back to the checkout that holds the package.
"""

from __future__ import annotations

import os
from pathlib import Path

TABLE = Path("exercises") / "course.toml"


def find_root(start: Path | str | None = None) -> Path:
    """The nearest folder at or above `start` (default: here) with an exercises/course.toml.

    The environment variable MINIVLLM_COURSE overrides the search. FileNotFoundError if none.
    """
    override = os.environ.get("MINIVLLM_COURSE")
    if override:
        if not (Path(override) / TABLE).is_file():
            raise FileNotFoundError(f"MINIVLLM_COURSE={override!r} holds no {TABLE}")
        return Path(override).resolve()
    here = Path(start or Path.cwd()).resolve()
    checkout = Path(__file__).resolve().parents[2]
    for folder in (here, *here.parents, checkout):
        if (folder / TABLE).is_file():
            return folder
    raise FileNotFoundError(
        f"no {TABLE} at or above {here}: run this inside the course's folder, "
        "or set MINIVLLM_COURSE to it"
    )


def work_folder(root: Path) -> Path:
    """The git-ignored folder for a student's own copies and small state."""
    return root / "work"
