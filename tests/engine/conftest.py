"""Fixtures of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minivllm.tokenizer import Tokenizer
from tiny_models import make_tokenizer

# The fake runner and the harness lie beside the tests that use them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte; id 0 is "!"."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return Tokenizer.from_dir(path)
