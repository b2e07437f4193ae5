"""`python -m minivllm ...`: the same commands as `minivllm ...`."""

from __future__ import annotations

from minivllm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
