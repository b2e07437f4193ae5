"""Fixtures of the tests that need a card; without one each test skips and says so.

MINIVLLM_TEST_DEVICE=cpu runs those that make sense there on the CPU backend: a check of the tests
themselves on a machine without a card.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # gpu_tools, under --import-mode=importlib

from gpu_tools import DEVICE, ON_GPU


@pytest.fixture(autouse=True)
def card() -> None:
    """Skips where there is no card, and where a test wants graphs and runs on a CPU."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def graphs() -> None:
    """For tests of captured graphs and of a card's memory."""
    if not ON_GPU:
        pytest.skip("needs a CUDA device: this is about its graphs or its memory")
