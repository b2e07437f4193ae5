"""Getting a model onto this machine: downloads and one-time conversions.

Owns everything that writes model directories into the cache. It never runs a model and never
imports torch: the result is an ordinary Hugging Face directory (config, safetensors, tokenizer)
that the loader reads like any other. Serves chapter 00, where the first real text is generated.
"""

from __future__ import annotations

from minivllm.fetch.smollm2 import fetch_smollm2

__all__ = ["fetch_smollm2"]
