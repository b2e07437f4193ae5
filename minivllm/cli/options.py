"""Options that commands share, and how they become engine options and sampling parameters.

Owns the mapping between flags and fields. Engine flags are made from the fields of `EngineConfig`,
so a new option of `LLM(...)` is a flag at once. A flag that is not given is not passed on: defaults
have one owner each, the engine or the model. Never imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from minivllm.engine_config import EngineConfig
from minivllm.generation_config import default_sampling_params
from minivllm.hub import resolve_model
from minivllm.sampling_params import SamplingParams

ENGINE_HELP = {
    "max_model_len": "longest prompt plus output, in tokens (default: the model's)",
    "max_num_seqs": "sequences that may hold KV blocks at a time",
    "max_num_batched_tokens": "token budget of one step; longer prompts are chunked",
    "kvcache_block_size": "tokens per KV block; 256 with flash_attn unless given",
    "num_kvcache_blocks": "blocks of the KV pool (default: from the memory there is)",
    "gpu_memory_utilization": "share of GPU memory for weights and KV pool",
    "tensor_parallel_size": "GPUs that share the model",
    "enforce_eager": "no captured graphs",
    "dtype": "float32, bfloat16, float16 or auto",
    "device": "cpu, cuda, cuda:N or auto",
    "load_format": "auto, safetensors, or dummy: seeded random weights from config.json alone",
    "enable_prefix_caching": "share KV blocks of equal prompt beginnings",
    "enable_chunked_prefill": "prompts in pieces beside decoding; off: prefill first",
    "attention_backend": "torch, sdpa, triton, flash_attn, compile or auto: the form of the "
    "operations; `minivllm doctor` says which run here and what auto is",
    "kv_cache_dtype": "type of the KV cache",
}
_TYPES = {"int": int, "int | None": int, "float": float, "float | None": float}
_TYPES |= {"str": str, "str | None": str}
# parts are Python objects; --seed is the seed of the requests.
_NO_FLAG = ("parts", "seed")
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop")


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model, and --verbose, which tells what loading decided."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"directory, org/name, smollm2 or tiny (default: {default_model()})",
    )
    parser.add_argument("--verbose", action="store_true", help="say what the engine decides")


def default_model() -> str:
    """The model of a command that names none: the bundled one where this version has it."""
    try:
        resolve_model("tiny")
    except ValueError:
        return "smollm2"
    return "tiny"


def add_system(parser: argparse.ArgumentParser) -> None:
    """What goes into a chat template beside the user's words."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        type=_json_object,
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )


def add_chat_switch(parser: argparse.ArgumentParser) -> None:
    """--chat/--no-chat and what belongs to them."""
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="prompts through the model's chat template, or as they are (default: --chat where "
        "the model has a template, except for `tiny`, which continues stories)",
    )
    add_system(parser)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, samples: bool) -> None:
    """Sampling flags; those not given keep the model's defaults (generation_config.json)."""
    group = parser.add_argument_group("sampling (defaults: the model's)")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"longest output (default: {max_tokens})",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="least set with probability P")
    group.add_argument("--top-k", type=int, metavar="K", help="the K most likely; 0 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="at least P of the most likely")
    group.add_argument(
        "--seed", type=int, metavar="N", help="another number, another text; runs repeat exactly"
    )
    if samples:
        group.add_argument("--n", type=int, metavar="N", help="samples of each prompt")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def sampling_params(path: Path, args: argparse.Namespace) -> SamplingParams:
    """The model's defaults with the flags that were given. Raises ValueError naming a bad one."""
    given = {name: value for name in _SAMPLING if (value := getattr(args, name, None)) is not None}
    return dataclasses.replace(default_sampling_params(path), **given)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of EngineConfig that can be written on a command line."""
    group = parser.add_argument_group("engine (defaults: those of LLM(...))")
    for field in dataclasses.fields(EngineConfig):
        flag, text = "--" + field.name.replace("_", "-"), ENGINE_HELP.get(field.name, "")
        if field.name in _NO_FLAG:
            continue
        if field.type == "bool":
            state = "on" if field.default else "off"
            group.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=f"{text} (default: {state})",
            )
        elif field.type in _TYPES:
            if field.default is not None:
                text += f" (default: {field.default})"
            metavar = "X" if "str" in str(field.type) else "N"
            group.add_argument(flag, type=_TYPES[str(field.type)], metavar=metavar, help=text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine flags that were given, checked: before torch is imported or a model read."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    given = {
        name: value
        for name in names
        if name not in _NO_FLAG and (value := getattr(args, name, None)) is not None
    }
    EngineConfig.from_options(given)
    return given


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The sizes of a benchmark's requests; those not given come from its named workload."""
    group = parser.add_argument_group("requests")
    group.add_argument("--num-requests", type=int, metavar="N")
    for name in ("--prompt-len", "--output-len"):
        group.add_argument(
            name, type=int, nargs=2, metavar=("MIN", "MAX"), help="tokens, drawn evenly"
        )
    group.add_argument("--seed", type=int, metavar="N", help="seed of the requests (default: 0)")


def workload_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """The size flags that were given, as fields of a WorkloadSpec."""
    sizes = {
        name: value
        for name in ("num_requests", "prompt_len", "output_len", "seed", "temperature")
        if (value := getattr(args, name, None)) is not None
    }
    return {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
