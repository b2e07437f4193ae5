"""`python -m minivllm.course ...`: the same commands as `minivllm course ...`."""

from __future__ import annotations

from minivllm.course.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
