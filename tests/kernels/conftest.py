"""Fixtures of the kernel tests: see kernel_tools."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # kernel_tools, under --import-mode=importlib

from kernel_tools import device, gpu, poisoned  # noqa: F401
