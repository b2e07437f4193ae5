"""What the GPU tests share: engines on the card over tiny models, and what they are compared with.

The reference is transformers in float32, as in the engine's own tests. bf16 and fp8 are judged by
margins: each token they choose must be nearly the best one of the reference on the same text.
"""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import torch

from minivllm import LLM, RequestOutput, SamplingParams
from tiny_models import VOCAB_SIZE, Reference

DEVICE = os.environ.get("MINIVLLM_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
LENGTHS = (1, 2, 3, 5, 9, 16, 17, 31, 48)
COUNT = 20
MAX_LEN = 96


def engine(path: Path, *, depth: int | None = 1, **options: Any) -> LLM:
    """An engine on the card: float32, a pool of 96 blocks, eight seats, unless said otherwise."""
    fixed = {"device": DEVICE, "dtype": "float32", "max_model_len": MAX_LEN, "max_num_seqs": 8}
    llm = LLM(str(path), **{**fixed, "num_kvcache_blocks": 96, **options})
    if ON_GPU:
        assert llm.backend == options.get("attention_backend", "triton")
        assert llm.engine.depth == 1
        assert (llm.engine.runner.graphs is None) == options.get("enforce_eager", False)
    if depth is not None:
        llm.engine.depth = depth
    return llm


def on_cpu(path: Path, **options: Any) -> LLM:
    """The same model on the CPU, at depth 0."""
    return LLM(str(path), device="cpu", max_model_len=MAX_LEN, num_kvcache_blocks=96, **options)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Seeded prompts over the whole vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def greedy(count: int = COUNT, **fields: Any) -> SamplingParams:
    """`count` tokens, whatever they are."""
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **fields})


def run(llm: LLM, batch: list[list[int]], params: Any = None) -> list[RequestOutput]:
    """All outputs; the pool is clean afterwards."""
    outputs = llm.generate(batch, params or greedy(), use_tqdm=False)
    assert llm.engine.scheduler.block_manager.num_used == 0
    return outputs


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    """Token ids of each request's first sample."""
    return [output.outputs[0].token_ids for output in outputs]


def regrets(
    reference: Reference, batch: list[list[int]], texts: list[list[int]]
) -> list[list[float]]:
    """For every token: how far its logit lies below the reference's best on the same text."""
    found = []
    for prompt, text in zip(batch, texts, strict=True):
        logits = reference.logits([*prompt, *text[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        found.append((logits.max(-1).values - chosen).tolist())
    return found


def assert_near_best(
    reference: Reference, batch: list[list[int]], texts: list[list[int]], tolerance: float
) -> None:
    """No token is worse than `tolerance` logits below the best, and most are the best."""
    values = [value for row in regrets(reference, batch, texts) for value in row]
    worst, exact = max(values), sum(value == 0 for value in values) / len(values)
    print(f"largest regret {worst:.4f}, best token chosen {exact:.1%}")
    assert worst <= tolerance and exact > 0.85, (worst, exact)


def allocated() -> int:
    """Bytes of live tensors on the card, once garbage and library workspaces are gone."""
    gc.collect()
    torch.cuda.synchronize()
    # cuBLAS keeps one workspace a stream, allocated at first use: not the engine's.
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
