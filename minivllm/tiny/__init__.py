"""The bundled toy model and its whole recipe, from the plot grammar to the model card.

`MODEL_DIR` is what `model="tiny"` means. Importing this module costs nothing; the steps of the
recipe (`python -m minivllm.tiny --help`) import what they need. The training loop is the only part
of the package that trains, and the engine never imports it.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
