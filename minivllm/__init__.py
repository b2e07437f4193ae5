"""minivllm: an LLM inference engine small enough to read and fast enough to use.

The public names are those of vLLM's offline API. They are imported on first use, so that
`import minivllm` costs milliseconds and the torch-free half can be used without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.llm import LLM as LLM
    from minivllm.outputs import CompletionOutput as CompletionOutput
    from minivllm.outputs import Logprob as Logprob
    from minivllm.outputs import RequestOutput as RequestOutput
    from minivllm.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "minivllm.llm",
    "SamplingParams": "minivllm.sampling_params",
    "RequestOutput": "minivllm.outputs",
    "CompletionOutput": "minivllm.outputs",
    "Logprob": "minivllm.outputs",
}
__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
