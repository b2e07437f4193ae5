"""A three-way merge of lines: a new stub into a file that a student has edited.

Owns the merge only; reads and writes no file. Where both sides changed the same lines, the
student's stay and the new ones follow as comments: the file still parses and nothing is lost.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

Region = tuple[int, int, int, int]  # base[a:b] became other[c:d]


def merge_lines(
    base: Sequence[str], mine: Sequence[str], new: Sequence[str], label: str
) -> tuple[list[str], int]:
    """Apply the change base -> new to `mine`. Returns the lines and the number of conflicts."""
    merged: list[str] = []
    conflicts = 0
    position = 0  # in base
    for start, end in _changed_spans(_changes(base, mine), _changes(base, new)):
        merged += base[position:start]
        ours = _side(base, mine, start, end)
        theirs = _side(base, new, start, end)
        original = list(base[start:end])
        if theirs == original or ours == theirs:
            merged += ours
        elif ours == original:
            merged += theirs
        else:
            conflicts += 1
            merged += [*ours, f"# [course update, {label}] the new stub has here:"]
            merged += [f"# | {line}".rstrip() for line in theirs]
        position = end
    merged += base[position:]
    return merged, conflicts


def _changes(base: Sequence[str], other: Sequence[str]) -> list[Region]:
    matcher = difflib.SequenceMatcher(a=list(base), b=list(other), autojunk=False)
    return [(a, b, c, d) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]


def _changed_spans(mine: list[Region], new: list[Region]) -> list[tuple[int, int]]:
    """Spans of base that either side changed; those that touch become one."""
    spans: list[tuple[int, int]] = []
    for start, end, _, _ in sorted([*mine, *new]):
        # Touching counts as overlapping: two insertions at one place have no order of their own.
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def _side(base: Sequence[str], other: Sequence[str], start: int, end: int) -> list[str]:
    """What base[start:end] became in `other`; both ends lie outside any of its changes."""
    lines: list[str] = []
    position = start
    for a, b, c, d in _changes(base, other):
        if start <= a and b <= end:
            lines += [*base[position:a], *other[c:d]]
            position = b
    return [*lines, *base[position:end]]
