"""Default sampling parameters of a model, from its generation_config.json.

Owns the translation of Hugging Face's names to ours. Never checks ranges: `SamplingParams` does.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from minivllm.config import read_json
from minivllm.sampling_params import NOT_BUILT, SamplingParams

logger = logging.getLogger(__name__)

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "repetition_penalty": "repetition_penalty",
}


def default_sampling_params(path: Path) -> SamplingParams:
    """vLLM's defaults, overridden by the checkpoint's generation_config.json where there is one.

    A field in it that is not built is named in a warning: the checkpoint asks for it, not the user.
    """
    file = path / "generation_config.json"
    raw = read_json(file) if file.exists() else {}
    fields: dict[str, Any] = {}
    for theirs, ours in _NAMES.items():
        value = raw.get(theirs)
        if value is None:
            continue
        if ours in NOT_BUILT:
            if value not in NOT_BUILT[ours]:
                logger.warning("%s: %s=%r is not built yet and not used", file, theirs, value)
            continue
        fields[ours] = value
    return SamplingParams(**fields)
