"""The progress bar of `LLM.generate`.

Owns what is shown while a call runs. Silent means silent: with the bar off nothing is written.
"""

from __future__ import annotations

import time
from types import TracebackType

from tqdm.auto import tqdm

from minivllm.outputs import EngineStats


class Progress:
    """A bar over requests, with the rates of prompt and generated tokens beside it."""

    def __init__(self, total: int, stats: EngineStats, show: bool) -> None:
        self._stats = stats
        self._prefilled = self._generated = 0
        self._steps_seen = len(stats.steps)
        self._generated_before = stats.generated_tokens
        self._started = time.perf_counter()
        self._bar = (
            tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
            if show and total
            else None
        )

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
