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
CARD_FILE = Path(__file__).parent / "card.md"
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
    """The model card: card.md with the figures of the reports and the unselected samples."""
    rows = report["samples"]["texts"]
    texts = [
        f"{i}. {row['text'].replace(chr(10) * 2, ' / ')}" + ("" if row["ended"] else " **[cut]**")
        for i, row in enumerate(rows, 1)
    ]
    template = CARD_FILE.read_text("utf-8")
    return template.format(
        **report,
        shape=summary["shape"],
        run=summary,
        settings=summary["training"],
        counts=counts,
        reading=reading,
        copied_percent=100 * report["copied"]["eight_grams_in_training"],
        right=list(report["questions"]["right_by_set"].values()),
        right_with_system=list(report["questions_with_system_prompt"]["right_by_set"].values()),
        distinct=list(report["samples"]["distinct"].values()),
        seeds=[rows[0]["seed"], rows[-1]["seed"]],
        texts="\n".join(texts),
        context=MAX_POSITION,
    )


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
