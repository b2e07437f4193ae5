"""How the commands write: sizes, the line on KV-cache use, JSON files, faint notes.

Owns formatting only. Serves chapter 00.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from minivllm.outputs import EngineStats


def styled(text: str, code: str, stream: TextIO | None = None) -> str:
    """`text` with an ANSI style ("1" bold, "2" faint) where `stream` is a terminal."""
    stream = stream or sys.stdout
    if not text or not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{code}m{text}\033[0m"


def note(text: str) -> None:
    """A line on stderr for a person who waits; nothing where nobody looks."""
    if sys.stderr.isatty():
        print(styled(f"minivllm: {text}", "2", sys.stderr), file=sys.stderr, flush=True)


def size(num_bytes: float) -> str:
    """Bytes as MiB, or GiB from 10 of them on."""
    mib = num_bytes / 2**20
    return f"{mib:,.1f} MiB" if mib < 10 * 1024 else f"{mib / 1024:,.1f} GiB"


def kv_use(stats: EngineStats) -> dict[str, int]:
    """Peak use of the KV pool, in blocks and bytes."""
    block_bytes = stats.kv_bytes // max(stats.num_blocks, 1)
    return {
        "block_size": stats.block_size,
        "num_blocks": stats.num_blocks,
        "peak_blocks": stats.peak_blocks_in_use,
        "kv_bytes": stats.kv_bytes,
        "peak_kv_bytes": stats.peak_blocks_in_use * block_bytes,
    }


def kv_line(stats: EngineStats) -> str:
    """The same in words."""
    use = kv_use(stats)
    return (
        f"KV cache: at most {use['peak_blocks']:,} of {use['num_blocks']:,} blocks, "
        f"{size(use['peak_kv_bytes'])} of {size(use['kv_bytes'])}"
    )


def print_json(value: Any, file: str = "-") -> None:
    """Write JSON to a file, or to stdout for "-"."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")


def check_writable(file: str | None) -> None:
    """OSError now, not after minutes of measuring, where `file` cannot be written."""
    if file not in (None, "-"):
        assert file is not None
        with open(file, "a", encoding="utf-8"):
            pass
