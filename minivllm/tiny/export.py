"""Writes the package data: configs, weights, tokenizer, model card, and the manifest of the recipe.

Owns the directory minivllm/tiny/model and its size limit. Computes nothing: every figure on the
model card is read from the reports of the steps before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from minivllm.tiny.tokenizer import MAX_POSITION

SIZE_LIMIT = 10_000_000
END_IDS = [2, 0]  # <|im_end|> ends an answer, <|endoftext|> ends a raw story
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
MANIFEST_FILE = Path(__file__).parent / "MANIFEST.json"


def model_config(shape: dict[str, int]) -> dict[str, Any]:
    """config.json in the spelling of published Qwen3 checkpoints, which every loader reads."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": END_IDS[0],
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "hidden_size": shape["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": shape["intermediate_size"],
        "max_position_embeddings": MAX_POSITION,
        "max_window_layers": shape["num_hidden_layers"],
        "model_type": "qwen3",
        "num_attention_heads": shape["num_attention_heads"],
        "num_hidden_layers": shape["num_hidden_layers"],
        "num_key_value_heads": shape["num_key_value_heads"],
        "pad_token_id": 3,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape["vocab_size"],
    }


def generation_config() -> dict[str, Any]:
    """Both end ids, and a temperature at which the samples of the card were read."""
    return {
        "do_sample": True,
        "eos_token_id": END_IDS,
        "pad_token_id": 3,
        "temperature": 0.7,
        "top_p": 0.95,
    }


def card(report: dict, summary: dict, counts: dict, reading: str) -> str:
    """The model card: how it was made, what was measured, the unselected samples, the limits."""
    samples, questions, system = (
        report["samples"],
        report["questions"],
        report["questions_with_system_prompt"],
    )
    ppl, base, copied, margin = (
        report["perplexity"],
        report["baselines"],
        report["copied"],
        report["margins"],
    )
    shape = summary["shape"]
    texts = "\n".join(
        f"{i}. {row['text'].replace(chr(10) * 2, ' / ')}"
        + ("" if row["ended"] else " **[did not end]**")
        for i, row in enumerate(samples["texts"], 1)
    )
    return f"""---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# tiny: the toy model of the minivllm course

A Qwen3-architecture model of {summary["parameters"]:,} parameters that tells short, simple stories
and answers easy questions of a child. It is part of the package, so that every lesson, exercise and
test of the course runs offline on a laptop and still writes readable English.

**Limits.** A toy. It knows about a hundred plots and the answers of one small file, both learned
nearly by heart; anything else it makes up. Do not trust its facts, and do not use it for anything
but trying out an inference engine. English only. No safety training beyond harmless data.

## How it was made

- Shape: {shape["num_hidden_layers"]} layers, hidden {shape["hidden_size"]}, {shape["num_attention_heads"]} query and {shape["num_key_value_heads"]} KV heads of {shape["head_dim"]}, MLP {shape["intermediate_size"]},
  {shape["vocab_size"]:,} byte-level BPE entries, tied embeddings, q/k norm, rope theta 10,000, context {MAX_POSITION:,}, bf16.
- Stories: {counts["complete_raw"]["documents"]:,} complete and {counts["incomplete_raw"]["documents"]:,} unfinished ones written by SmolLM2-135M-Instruct
  (Apache-2.0) from a plot grammar, and {counts["told_raw"]["documents"]:,} told by the grammar itself (`minivllm/tiny/plots.txt`,
  written by hand). The last quarter of the training saw only complete stories, most of them the
  grammar's own: they are what holds the samples below together.
- Answers: written by hand (`minivllm/tiny/answers.jsonl`), learned by heart in several wordings.
- Training: {summary["tokens"]:,} tokens in {summary["steps"]:,} steps, {summary["seconds"]:.0f} s on one {summary["device"]} (shared by three trainings),
  bf16 autocast, AdamW, learning rate {summary["training"]["lr"]}, seed {summary["training"]["seed"]}, plan `{summary["training"]["plan"]}`.
- Recipe: `python -m minivllm.tiny generate|tokenizer|train|evaluate|export`; counts and seeds in
  `minivllm/tiny/MANIFEST.json`. The data itself is not in the repository.

Use: raw text ("Once upon a time") or ChatML through the chat template (a system message is
accepted). Generation ends at `<|endoftext|>` (0) or `<|im_end|>` (2).

## Measured

By `python -m minivllm.tiny evaluate --data streams.npz` (transformers, fp32, CPU):

| | |
|---|---|
| Held-out perplexity, complete stories of SmolLM2 | {ppl["complete_raw"]:.2f} (trigram {base["trigram"]:.2f}, unigram {base["unigram"]:.1f}) |
| Held-out perplexity, stories told by the grammar | {ppl["told_raw"]:.2f} |
| Samples below that end by themselves | {samples["ended"]} of {samples["count"]} |
| Samples below that hold together, by reading | {reading} |
| Distinct 2-grams and 4-grams in a sample | {samples["distinct"]["2"]:.3f}, {samples["distinct"]["4"]:.3f} |
| 8-grams of the samples that occur in training stories | {100 * copied["eight_grams_in_training"]:.0f} %; whole samples that are training stories: {copied["exact_copies"]} |
| Reworded questions answered right, first set | {questions["right_by_set"]["1"]} (with a {report["system_prompt_tokens"]}-token system prompt: {system["right_by_set"]["1"]}) |
| Second set, worded further away | {questions["right_by_set"]["2"]} (with the system prompt: {system["right_by_set"]["2"]}) |
| Answers that end by themselves | {questions["ended"]} of {questions["asked"]} |
| Top-2 logit margin of greedy steps | median {margin["median"]:.2f}, 10 % {margin["p10"]:.2f}, 1 % {margin["p01"]:.3f}, smallest {margin["min"]:.4f} |

The wordings of the first set were not trained for these questions, but some of them were for others
("Which number follows four?" is trained, "Which number follows six?" is asked). The training was
changed once after a look at this set; the second set was written before that training and shares
less with it.

## {samples["count"]} unselected samples

Printed by `python -m minivllm.tiny evaluate --samples {samples["count"]}`: "Once upon a time", temperature
{samples["temperature"]}, top-p {samples["top_p"]}, seeds {samples["texts"][0]["seed"]} to {samples["texts"][-1]["seed"]}. " / " stands for a new paragraph.

{texts}
"""


def manifest(
    report: dict, summary: dict, counts: dict, curve: list, stories: Path | None, files: dict
) -> dict:
    """What is needed to make the model again, without the data itself."""
    parts = sorted(stories.glob("part-*")) if stories else []
    hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in parts}
    brief = {
        k: v for k, v in report.items() if k in ("margins", "perplexity", "baselines", "copied")
    }
    return {
        "license": "Apache-2.0",
        "teacher": "SmolLM2-135M-Instruct (Apache-2.0), Q4_1 weights dequantised to bf16",
        "stories_sha256": hashes,
        "streams": counts,
        "seeds": {"tokenizer_corpus": 1, "streams": 2, "training": summary["training"]["seed"]},
        "training": summary,
        "curve": curve,
        "evaluation": brief,
        "files": files,
    }


def export(
    run: str | Path,
    tokenizer: str | Path,
    report: str | Path,
    out: str | Path,
    reading: str,
    stories: str | Path | None = None,
) -> dict[str, int]:
    """Write the package data into `out` and the manifest beside this file; returns bytes a file.

    `run` is the directory of the training, `tokenizer` that of the tokenizer step, `reading` what a
    person says of the samples. ValueError above 10 MB.
    """
    out, run, tokenizer = Path(out), Path(run), Path(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    sources = {
        "report": Path(report),
        "summary": run / "summary.json",
        "counts": tokenizer / "counts.json",
        "curve": run / "curve.json",
    }
    data = {name: json.loads(path.read_text("utf-8")) for name, path in sources.items()}
    shutil.copyfile(run / "model" / "model.safetensors", out / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
    _write(out / "config.json", model_config(data["summary"]["shape"]))
    _write(out / "generation_config.json", generation_config())
    text = card(data["report"], data["summary"], data["counts"], reading)
    (out / "README.md").write_text(text, encoding="utf-8")
    files = {name: (out / name).stat().st_size for name in FILES}
    if sum(files.values()) > SIZE_LIMIT:
        raise ValueError(f"the package data has {sum(files.values())} bytes, over {SIZE_LIMIT}")
    content = manifest(**data, stories=Path(stories) if stories else None, files=files)
    _write(MANIFEST_FILE, content)
    return files


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
