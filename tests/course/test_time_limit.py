"""An answer that never returns ends with an error; nothing is left of the alarm."""

import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from minivllm.course import pytest_plugin, time_limit

needs_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarm here")


@needs_alarm
def test_an_endless_loop_ends():
    before = signal.getsignal(signal.SIGALRM)
    message = r"no answer after 0.2 s: does the loop end\?"
    with pytest.raises(TimeoutError, match=message), time_limit.time_limit(0.2):
        while True:
            pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@needs_alarm
def test_an_answer_in_time_is_left_alone():
    with time_limit.time_limit(0.2):
        pass
    time.sleep(0.3)  # an alarm left behind would go off here


@needs_alarm
def test_another_thread_has_no_limit():
    found = []

    def run():
        with time_limit.time_limit(0.001):
            found.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0]


@pytest.mark.parametrize(("task", "graded", "limited"), [("ch01.1", 1, 1), ("", 1, 0), ("x", 0, 0)])
def test_course_tests_alone_are_limited(task, graded, limited, monkeypatch):
    entered = []

    @contextmanager
    def limit():
        entered.append(1)
        yield

    monkeypatch.setattr(time_limit, "time_limit", limit)
    mark = SimpleNamespace(args=[task]) if task else None
    stash = {pytest_plugin.GRADING: object()} if graded else {}
    item = SimpleNamespace(
        config=SimpleNamespace(stash=stash), get_closest_marker=lambda name: mark
    )
    hook = pytest_plugin.pytest_runtest_call(item)
    next(hook)
    assert len(entered) == limited
    with pytest.raises(StopIteration):
        hook.send(None)
