"""Fixtures of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

# The fake runner and the harness lie beside the tests that use them.
sys.path.insert(0, str(Path(__file__).parent))
