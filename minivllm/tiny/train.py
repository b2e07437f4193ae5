"""Trains the tiny model: transformers' Qwen3ForCausalLM, one GPU (or a CPU, slowly), resumable.

Owns the model's shape, the learning-rate curve, the loop and its checkpoint. The order of the
data belongs to packing.py, so a checkpoint is weights, optimizer, random state and a step number.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from minivllm.tiny.data import EOT, IM_END, PAD, load_streams
from minivllm.tiny.packing import IGNORE, PLANS, inputs_and_targets, pack, plan_batches
from minivllm.tiny.tokenizer import MAX_POSITION


@dataclass(frozen=True)
class Shape:
    """The model's size. Eight query heads share four KV heads, so that GQA is real here."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    intermediate_size: int = 640
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32


@dataclass(frozen=True)
class Training:
    """The settings of one run; all of them are written into the manifest."""

    plan: str = "main"
    seed: int = 1
    lr: float = 3e-3
    tokens_per_step: int = 32768
    warmup: int = 100
    weight_decay: float = 0.1
    max_steps: int = 0
    eval_every: int = 100
    save_every: int = 500


def build_model(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised fp32 Qwen3 with tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **asdict(shape),
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=[IM_END, EOT],
        pad_token_id=PAD,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def make_optimizer(model: torch.nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW; norm weights (one dimension) are not decayed."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=training.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(step: int, total: int, training: Training) -> float:
    """Linear warm-up, then a cosine down to 3 % of the peak."""
    if step < training.warmup:
        return training.lr * (step + 1) / training.warmup
    done = (step - training.warmup) / max(1, total - training.warmup)
    return training.lr * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))


def batch_loss(model: torch.nn.Module, batch: np.ndarray, device: str) -> torch.Tensor:
    """Mean cross-entropy in nats over the tokens that carry a loss."""
    inputs, targets = (torch.from_numpy(x).to(device) for x in inputs_and_targets(batch))
    autocast = (
        torch.autocast(device, dtype=torch.bfloat16)
        if device == "cuda"
        else contextlib.nullcontext()
    )
    with autocast:
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, documents: Sequence[np.ndarray], device: str) -> float:
    """Mean loss in nats a token; rows of 512 hold several documents, as in training."""
    model.eval()
    total, count = 0.0, 0
    rows = pack([*documents, np.full(512, PAD | 0x8000, dtype=np.uint16)], 512)
    for start in range(0, len(rows), 16):
        batch = rows[start : start + 16]
        tokens = int((inputs_and_targets(batch)[1] != IGNORE).sum())
        total += float(batch_loss(model, batch, device)) * tokens
        count += tokens
    model.train()
    return total / max(1, count)


def save_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, curve: list
) -> None:
    """All that a resumed run needs; written beside and moved, so a crash leaves the old one."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "curve": curve,
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> tuple[int, list]:
    """Restore a run; returns the next step and the curve so far."""
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"].cpu())
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
    return state["step"], state["curve"]


def train(
    data: str | Path, out: str | Path, shape: Shape, training: Training, stop_at: int = 0
) -> dict:
    """Train and write `out`: checkpoint.pt, curve.json, curve.png, summary.json, model/.

    A checkpoint in `out` is resumed. `stop_at` ends the run early at that step (as an interruption
    would), leaving a checkpoint. Returns the summary that is also written to summary.json.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    streams = load_streams(data)
    batches = plan_batches(streams, PLANS[training.plan], training.tokens_per_step, training.seed)
    batches = batches[: training.max_steps] if training.max_steps else batches
    model = build_model(shape, training.seed).to(device).train()
    started = time.perf_counter()
    curve = run_steps(model, batches, streams, training, out, stop_at or len(batches))
    summary = {
        "shape": asdict(shape),
        "training": asdict(training),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": len(batches),
        "tokens": sum(b.shape[0] * (b.shape[1] - 1) for b in batches),
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "final": curve[-1] if curve else {},
    }
    write_results(out, model, curve, summary)
    return summary


def run_steps(
    model: Qwen3ForCausalLM,
    batches: Sequence[np.ndarray],
    streams: dict[str, list[np.ndarray]],
    training: Training,
    out: Path,
    last: int,
) -> list[dict]:
    """Steps from the checkpoint (or from 0) up to `last`; returns the curve, one point an eval."""
    device = next(model.parameters()).device.type
    optimizer = make_optimizer(model, training)
    held = {name[5:]: d for name, d in streams.items() if name.startswith("held_")}
    step, curve = 0, list[dict]()
    if (out / "checkpoint.pt").exists():
        step, curve = load_checkpoint(out / "checkpoint.pt", model, optimizer, device)
    bar = tqdm(total=len(batches), initial=step, desc=out.name, mininterval=5.0)
    while step < last:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), training)
        loss = batch_loss(model, batches[step], device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        if step % training.eval_every == 0 or step == len(batches):
            # .item() waits for the GPU, so the loss is read only here.
            losses = {name: held_out_loss(model, d, device) for name, d in held.items()}
            curve.append({"step": step, "train": loss.item(), **losses})
            bar.set_postfix({"loss": f"{curve[-1]['train']:.3f}"})
        if step % training.save_every == 0 or step == last:
            save_checkpoint(out / "checkpoint.pt", model, optimizer, step, curve)
    bar.close()
    return curve


def write_results(out: Path, model: Qwen3ForCausalLM, curve: list[dict], summary: dict) -> None:
    """The bf16 weights and config, the curve as numbers and as a picture, the summary."""
    # Casting the model keeps the tied head a single tensor in the file; a cast state dict does not.
    model.to(torch.bfloat16).save_pretrained(out / "model")
    (out / "curve.json").write_text(json.dumps(curve, indent=1))
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    if curve:
        plot_curve(curve, out / "curve.png")


def plot_curve(curve: list[dict], path: Path) -> None:
    """Loss against step, one line a column of the curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name in (key for key in curve[0] if key != "step"):
        axes.plot(
            [p["step"] for p in curve], [p[name] for p in curve], label=name.replace("_", " ")
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_ylim(0, 4)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
