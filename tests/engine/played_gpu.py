"""Stands for a GPU's part of captured graphs, so that all around it can be tested without one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch


class Ring:
    """A pinned buffer, never zeros: what a launch does not write must not be read."""

    def __init__(self, shape, dtype):
        self.buffer = torch.full(shape, 77, dtype=dtype)

    @contextmanager
    def next(self):
        yield self.buffer


class Pool:
    """A replay calls again, and leaves its results in the tensors of the capture, as a graph."""

    def capture(self, function):
        output = function()

        def replay():
            again = function()
            if output is not None:
                output.copy_(again)

        return SimpleNamespace(replay=replay), output
