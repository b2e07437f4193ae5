"""README's table of engine options is that of the engine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from minivllm.engine_config import EngineConfig

README = Path(__file__).parents[1] / "README.md"


def test_every_engine_option_is_in_the_table_once() -> None:
    text = README.read_text(encoding="utf-8").partition("## Options of `LLM(model, ...)`")[2]
    rows = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], flags=re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(EngineConfig))
