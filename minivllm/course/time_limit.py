"""Ends an answer that never comes back, with an error that says so.

Owns the alarm and nothing else. Speed is never graded: the limit is far above what any test takes
on a slow machine. Where Python has no alarm (Windows, other threads) there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 30


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raise TimeoutError in the code inside once `seconds` have passed."""
    has_alarm = hasattr(signal, "setitimer")
    if not has_alarm or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer after {seconds:g} s: does the loop end?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
