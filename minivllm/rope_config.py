"""The rotary part of `config.json`: base frequency and scaling, in either spelling.

Owns which scalings exist and which keys each has: a key that is not known changes the mathematics,
and is refused by name. Never computes a frequency: that is `layers/rotary.py`. Lesson 03.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Scaling type -> (required keys, optional keys). A key outside both changes the maths: refused.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (("factor",), (*_YARN_OPTIONAL, "original_max_position_embeddings", "truncate")),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: the base and, for long contexts, how it is scaled."""

    theta: float
    rope_type: str
    scaling: Mapping[str, Any]

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RopeConfig:
        """Read either spelling; an unknown type or key is a ValueError that names it."""
        scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
        modern = scaling.pop("rope_type", None)
        rope_type = modern or scaling.pop("type", None) or "default"
        scaling.pop("type", None)  # files in both spellings at once exist
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        partial = scaling.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor={partial} is not supported; only 1.0")
        required, optional = _ROPE_KEYS[rope_type]
        missing = [key for key in required if scaling.get(key) is None]
        unknown = sorted(k for k, v in scaling.items() if v is not None) if scaling else []
        unknown = [key for key in unknown if key not in (*required, *optional)]
        if missing or unknown:
            raise ValueError(
                f"rope_type {rope_type!r}: missing keys {missing}, unsupported keys {unknown}"
            )
        if rope_type == "yarn" and not scaling.get("original_max_position_embeddings"):
            scaling["original_max_position_embeddings"] = raw["max_position_embeddings"]
        return RopeConfig(float(theta), rope_type, scaling)
