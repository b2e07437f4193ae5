"""`minivllm bench kv-accuracy`: how far an 8-bit cache is from the plain one.

Owns what this command prints; `minivllm.bench.kv_accuracy` measures.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minivllm.cli.text import check_writable, note, print_json
from minivllm.hub import resolve_model

if TYPE_CHECKING:
    from minivllm.bench.kv_accuracy import CacheAccuracy, Comparison


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    for flag, value in (("--tokens", args.tokens), ("--threads", args.threads)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    check_writable(args.json)
    path = resolve_model(args.model)

    import torch

    from minivllm.bench.kv_accuracy import compare_caches

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    result = compare_caches(path, tokens=args.tokens, progress=note)
    if args.json != "-":
        print(report(args.model, result))
    if args.json:
        print_json({"model": args.model, **result.to_dict()}, args.json)
    return 0


def report(model: str, result: Comparison) -> str:
    """A paragraph for each cache."""
    lengths = result.text_lengths
    head = f"{model}: {len(lengths)} greedy texts of chat prompts, {sum(lengths)} tokens; float32"
    return "\n".join([head, *(_lines(cache) for cache in result.caches)])


def _lines(cache: CacheAccuracy) -> str:
    shares, kl, own = cache.to_dict(), cache.kl, cache.logprob_error
    lines = [
        f"{cache.cache} cache against the plain one",
        f"  equal texts          {cache.equal_texts} of {cache.num_texts}; "
        f"common prefix {shares['mean_common_prefix']:.1f} tokens on average",
        f"  same best token      {cache.same_best} of {cache.num_positions} positions of the plain "
        f"texts ({100 * shares['same_best_share']:.2f} %)",
        f"  logit error          {cache.logit_error:.2e} rms, {cache.worst_logit_error:.2e} at "
        f"worst; logits spread by {cache.logit_spread:.2f}: {shares['relative_logit_error']:.1e}",
        f"  next token's logprob off by {own.mean:.1e} on average, {own.p99:.1e} at the 99th "
        f"percentile, {own.max:.1e} at worst",
        f"  KL divergence        {kl.mean:.1e} nats, {kl.p99:.1e}, {kl.max:.1e}",
    ]
    if cache.flip_margins:
        margins = cache.flip_margins
        shown = ", ".join(f"{margin:.3f}" for margin in margins[:6])
        dots = ", ..." if len(margins) > 6 else ""
        lines.append(f"  where they disagree  plain margin of best to second: {shown}{dots}")
        lines.append(
            f"                       {cache.closer_calls} positions have at most {margins[0]:.3f}"
        )
    return "\n".join(lines)
