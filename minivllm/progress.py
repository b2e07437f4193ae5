"""The progress bar of `LLM.generate`.

Owns what is shown while a call runs. Silent means silent: with the bar off nothing is written.
"""

from __future__ import annotations

import sys
import time
import warnings
from types import TracebackType
from typing import Any

from minivllm.outputs import EngineStats


class Progress:
    """A bar over requests, with the rates of prompt and generated tokens beside it."""

    def __init__(self, total: int, stats: EngineStats, show: bool) -> None:
        self._stats = stats
        self._prefilled = self._generated = 0
        self._steps_seen = len(stats.steps)
        self._generated_before = stats.generated_tokens
        self._started = time.perf_counter()
        # A program without a console (pythonw, some services) has no stderr to draw on.
        self._bar = _bar(total) if show and total and sys.stderr is not None else None

    def __enter__(self) -> Progress:
        return self

    def request_done(self) -> None:
        """One prompt is complete."""
        if self._bar is not None:
            self._bar.update(1)

    def step_done(self) -> None:
        """Refresh the rates."""
        if self._bar is None:
            return
        for step in self._stats.steps[self._steps_seen :]:
            self._prefilled += step.num_tokens - step.num_decode
        self._steps_seen = len(self._stats.steps)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        generated = self._stats.generated_tokens - self._generated_before
        self._bar.set_postfix_str(
            f"prefill {self._prefilled / seconds:.0f} tok/s, "
            f"decode {generated / seconds:.0f} tok/s",
            refresh=False,  # the bar redraws at its own interval; every step would cost 1 ms
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(total: int) -> Any:
    with warnings.catch_warnings():
        # In a notebook without ipywidgets this import warns, and then draws a text bar all the
        # same. Imported here, so that a silent session does not see even that.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm
    return tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
