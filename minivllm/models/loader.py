"""From safetensors files to a filled model, every tensor accounted for.

Owns which file tensor goes to which parameter. The account is kept both ways (case K43): a
parameter, or a part of a packed one, that nothing filled is an error; a tensor nobody asked for is
reported. Never matches by substring: names are split at dots and compared whole. Lesson 05.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minivllm.config import ModelConfig, read_json
from minivllm.layers.linear import Linear
from minivllm.models.decoder import CausalLM
from minivllm.ops.table import Ops

logger = logging.getLogger(__name__)

# A checkpoint module -> the packed module that holds it, and its part there.
PACKED_MODULES = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}
_CHECKPOINT_MODULE = {packed: name for name, packed in PACKED_MODULES.items()}
# Last pieces of names that only quantised checkpoints have (GPTQ, AWQ, FP8, bitsandbytes, ...).
QUANTISED = frozenset(
    ("qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_packed")
    + ("input_scale", "SCB", "absmax", "quant_map")
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    *,
    max_position: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> CausalLM:
    """Build the model and fill it from `path`, or with seeded random numbers ("dummy").

    Raises ValueError naming missing, misshapen or quantised tensors and unreadable files.
    """
    # Built without storage, then allocated once at its place: no second copy, no wasted init.
    with torch.device("meta"):
        model = CausalLM(config, ops, max_position)
    model = model.to(dtype)
    for module in model.modules():
        # Not `to_empty`: it imports sympy for the shapes of a meta tensor, 2 s of a start.
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    model.build_rope(device)
    if load_format == "dummy":
        fill_randomly(model, seed)
    else:
        fill_from_files(model, path)
    model.prepare()
    if device.type == "cuda":
        # A kernel launched ahead of its turn may read weights before it waits for the one in front.
        torch.cuda.synchronize(device)
    return model.eval()


def fill_randomly(model: CausalLM, seed: int) -> None:
    """Seeded weights of a size that keeps activations near 1; norms are ones."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


def fill_from_files(model: CausalLM, path: Path) -> None:
    """Copy every tensor of a checkpoint directory to its place."""
    wanted = _wanted(model)
    missing = set(wanted)
    unexpected: list[str] = []
    head: torch.Tensor | None = None
    for name, tensor in iterate_tensors(path):
        if name == HEAD and model.lm_head is None:
            head = tensor
        elif name in wanted:
            _fill(path, name, tensor, *wanted[name])
            missing.discard(name)
        elif name.rpartition(".")[2] in QUANTISED:
            raise ValueError(f"{path}: tensor {name!r} is quantised; quantisation is not supported")
        elif not name.endswith(".rotary_emb.inv_freq"):  # recomputed from the config, always
            unexpected.append(name)
    if missing:
        raise ValueError(f"{path}: {len(missing)} tensors are missing: {_some(sorted(missing))}")
    if unexpected:
        logger.warning("%s: tensors not used: %s", path, _some(sorted(unexpected)))
    if head is not None:
        _untie_if_different(model, head, path)


def _fill(
    path: Path, name: str, tensor: torch.Tensor, module: Linear, parameter: nn.Parameter, part: str
) -> None:
    if tensor.dtype not in FLOATS:  # a copy would convert it, and drop the scales it lives by
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{path}: tensor {name!r} is stored as {kind}; quantisation is not supported"
        )
    try:
        module.weight_loader(parameter, tensor, part)
    except ValueError as error:
        raise ValueError(f"{path}: tensor {name!r}: {error}") from None


def _wanted(model: CausalLM) -> dict[str, tuple[Linear, nn.Parameter, str]]:
    """Checkpoint name -> (module, parameter, part) for all that the model needs."""
    wanted: dict[str, tuple[Linear, nn.Parameter, str]] = {}
    for module_name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            prefix, _, last = module_name.rpartition(".")
            for part in module.parts:
                own = _CHECKPOINT_MODULE[(last, part)] if part else last
                full = ".".join(piece for piece in (prefix, own, kind) if piece)
                wanted[full] = (module, parameter, part)
    return wanted


def _untie_if_different(model: CausalLM, head: torch.Tensor, path: Path) -> None:
    """A tied checkpoint may still carry a head (case K60): a copy is dropped, a real one is used.

    The published config is wrong in that case, and the weights are what was trained.
    """
    embedding = model.model.embed_tokens.weight
    if head.shape == embedding.shape and torch.equal(
        head.to(embedding.device, embedding.dtype), embedding
    ):
        return
    logger.warning(
        "tie_word_embeddings is true, but the checkpoint's lm_head.weight differs from "
        "embed_tokens.weight: using the checkpoint's head"
    )
    with torch.device(embedding.device):
        linear = Linear(embedding.shape[1], embedding.shape[0], bias=False).to(embedding.dtype)
    _fill(path, HEAD, head, linear, linear.weight, "")
    model.lm_head = linear


def iterate_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, file by file, memory-mapped."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no dict)
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from None


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights. With an index, its shards alone.

    Directories with a stray consolidated file beside the shards are published too; reading both
    would load every weight twice.
    """
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map of tensor names to files")
        names = sorted({str(name) for name in weight_map.values()})
        files = [path / name for name in names]
    elif (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(f"{path}: weight files named by the index are missing: {_some(absent)}")
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file")
    return files


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
