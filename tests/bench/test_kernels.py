"""How `bench kernels` times, with a clock that counts captured launches."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch


@pytest.mark.parametrize("calls", [1, 3, 8, 28, 200])
def test_a_launch_takes_the_same_however_many_are_captured(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from minivllm.bench import kernels

    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 1e-3 * (2.0 * captured)  # milliseconds: 2 us a launch

    def count() -> None:
        nonlocal captured
        captured += 1

    def capturing(graph: Graph) -> nullcontext[None]:
        nonlocal captured
        captured = 0  # what ran before was outside
        return nullcontext()

    captured = 0
    for name, value in {"CUDAGraph": Graph, "Event": Event, "graph": capturing}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert kernels.replay([count] * calls) == pytest.approx(2.0)
    assert captured >= 128 and captured % calls == 0
    # The device is busy when the clock starts.
    assert done[:5] == ["replay", "event", "replay", "event", "wait"]
