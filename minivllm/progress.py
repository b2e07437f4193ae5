"""Progress bars: requests of `LLM.generate`, and runs of a measurement.

Owns what is shown while a call runs. Silent means silent: with a bar off nothing is written.
"""

from __future__ import annotations

import sys
import time
import warnings
from types import TracebackType
from typing import Any

from minivllm.outputs import EngineStats


class Progress:
    """A bar over requests, with the tokens so far and their rates beside it."""

    def __init__(self, total: int, stats: EngineStats, show: bool) -> None:
        self._stats = stats
        self._prefilled = self._generated = 0
        self._steps_seen = len(stats.steps)
        self._generated_before = stats.generated_tokens
        self._started = time.perf_counter()
        # A program without a console (pythonw, some services) has no stderr to draw on.
        drawn = show and total and sys.stderr is not None
        self._bar = open_bar(total, "Processed prompts", "prompt") if drawn else None

    def __enter__(self) -> Progress:
        return self

    def request_done(self) -> None:
        """One prompt is complete."""
        if self._bar is not None:
            self._bar.update(1)

    def step_done(self) -> None:
        """Refresh the tokens: one long request must be seen to move."""
        if self._bar is None:
            return
        for step in self._stats.steps[self._steps_seen :]:
            self._prefilled += step.num_tokens - step.num_decode
        self._steps_seen = len(self._stats.steps)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        generated = self._stats.generated_tokens - self._generated_before
        self._bar.set_postfix_str(
            f"{generated} tok, in {self._prefilled / seconds:.0f}, "
            f"out {generated / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update(0)  # redraws if its interval is over; at every step it would cost 1 ms

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def open_bar(total: int, title: str, unit: str, show: bool = True) -> Any:
    """A tqdm bar that redraws by the clock, also where its count stands still."""
    with warnings.catch_warnings():
        # In a notebook without ipywidgets this import warns, and then draws a text bar all the
        # same. Imported here, so that a silent session does not see even that.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm
    return tqdm(
        total=total, desc=title, unit=unit, dynamic_ncols=True, miniters=0, disable=not show
    )
