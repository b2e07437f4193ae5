"""Every case of the casebook has tests named after it, or a reason why not here."""

from __future__ import annotations

import re
from pathlib import Path

# Cases that need what this machine or this version does not have. Where a part can be tested
# without it, the tests are listed by their name as for the others.
ELSEWHERE = {
    "k11": "a dying worker: there are no workers before tensor parallelism",
    "k16": "CUDA graph buckets: come with the graphs, their CPU unit included",
    "k41": "the command channel to workers: comes with tensor parallelism",
}
HERE = [
    "k01",
    "k03",
    "k04",
    "k05",
    "k07",
    "k08",
    "k09",
    "k10",
    "k18",
    "k19",
    "k21",
    "k22",
    "k24",
    "k25",
    "k26",
    "k28",
    "k30",
    "k32",
    "k36",
    "k37",
    "k39",
    "k40",
    "k43",
    "k45",
    "k46",
    "k48",
    "k49",
    "k55",
    "k56",
    "k58",
    "k59",
    "k60",
    "k61",
    "k63",
    "k64",
    "k66",
    "k67",
]


def test_every_case_has_a_test() -> None:
    names = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    found = set(re.findall(r"k\d\d", " ".join(re.findall(r"def test_(\S+)\(", names))))
    assert [case for case in HERE if case not in found] == []
    assert not set(HERE) & set(ELSEWHERE)
    assert len(HERE) + len(ELSEWHERE) == 40
