"""Every case of the casebook has tests named after it, or a reason why not here."""

from __future__ import annotations

import re
from pathlib import Path

# Cases that need what this machine or this version does not have. Where a part can be tested
# without it, the tests are listed by their name as for the others.
ELSEWHERE = {
    "k11": "a dying worker: there are no workers before tensor parallelism",
    "k16": "CUDA graphs: CPU unit in tests/engine/test_decode_graphs.py, replay in tests/gpu",
    "k41": "the command channel to workers: comes with tensor parallelism",
}
HERE = {
    f"k{number:02}"
    for number in (
        *(1, 3, 4, 5, 7, 8, 9, 10, 18, 19, 21, 22, 24, 25, 26, 28, 30, 32, 36, 37, 39, 40, 43, 45),
        *(46, 48, 49, 55, 56, 58, 59, 60, 61, 63, 64, 66, 67),
    )
}


def test_every_case_has_a_test() -> None:
    names = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    found = set(re.findall(r"k\d\d", " ".join(re.findall(r"def test_(\S+)\(", names))))
    assert HERE - found == set()
    assert not HERE & set(ELSEWHERE)
    assert len(HERE) + len(ELSEWHERE) == 40
