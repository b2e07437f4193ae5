"""What all tests share: one thread, fixed seeds, and tiny checkpoints made once a session.

A checkpoint and its transformers reference cost tenths of a second, so both are cached by their
recipe. Tests must not write into a shared directory; `copy_model` gives one of their own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tiny_models import Reference

# Before torch starts its pool: two threads beside a busy neighbour can be 100 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every run and in any order of tests."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family, **config) -> a shared directory of that recipe. Read only."""
    made: dict[str, Path] = {}

    def get(family: str = "qwen3", **config: Any) -> Path:
        from transformers.utils import logging

        from tiny_models import make_model

        logging.disable_progress_bar()
        key = json.dumps([family, config], sort_keys=True)
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, **config)
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    """reference(path) -> transformers on that directory, with its greedy texts remembered."""
    made: dict[Path, Reference] = {}

    def get(path: Path) -> Reference:
        from transformers.utils import logging

        from tiny_models import Reference

        logging.disable_progress_bar()
        if path not in made:
            made[path] = Reference(path)
        return made[path]

    return get


@pytest.fixture
def copy_model(tmp_path: Path) -> Callable[..., Path]:
    """copy_model(path, config changes...) -> a private copy; a value of ... deletes the key."""
    count = iter(range(1000))

    def copy(path: Path, **changes: Any) -> Path:
        target = tmp_path / f"model{next(count)}"
        shutil.copytree(path, target)
        file = target / "config.json"
        config = json.loads(file.read_text())
        for key, value in changes.items():
            if value is ...:
                config.pop(key, None)
            else:
                config[key] = value
        file.write_text(json.dumps(config))
        return target

    return copy
