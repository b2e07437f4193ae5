"""From flags to a loaded model, with the seconds of each part.

Owns the order: everything that can be wrong in the flags is checked before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli import options
from minivllm.cli.text import note
from minivllm.hub import resolve_model
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM

SMALL_BYTES = 50 * 2**20


@dataclass(slots=True)
class Timing:
    """Seconds by the name of what took them."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time a block."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def line(self) -> str:
        """All of it in one line."""
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


@dataclass(frozen=True, slots=True)
class Prepared:
    """Flags that have been checked."""

    name: str
    path: Path
    params: SamplingParams
    engine: dict[str, Any]

    @property
    def continues_stories(self) -> bool:
        """True for the bundled model, which has a chat template but is mostly a story teller."""
        return self.name == "tiny"


def prepare(args: argparse.Namespace) -> Prepared:
    """Check everything that needs no torch; fetches the model where it is not here yet."""
    engine = options.engine_options(args)
    name = args.model or options.default_model()
    path = resolve_model(name)
    return Prepared(name, path, options.sampling_params(path, args), engine)


def _is_small(path: Path) -> bool:
    """True for a model of so few parameters that a second thread only waits for the first.

    The bundled model (4.7 M) writes no faster on two threads; beside a busy neighbour two of them
    took 16 times as long as one, each waiting for the other at every product.
    """
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) < SMALL_BYTES


def load(prepared: Prepared, timing: Timing) -> LLM:
    """Import torch, then load; timed apart, since the first is nobody's fault here."""
    note(f"loading {prepared.name}")
    with timing.measure("import torch"):
        import torch
    if _is_small(prepared.path) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    with timing.measure("load"):
        from minivllm.llm import LLM

        return LLM(str(prepared.path), **prepared.engine)
