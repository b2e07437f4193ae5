"""The maker of small GGUF files, one folder a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_builder import GgufMaker


@pytest.fixture
def gguf_maker(tmp_path: Path) -> GgufMaker:
    folder = tmp_path / "gguf"
    folder.mkdir()
    return GgufMaker(folder)
