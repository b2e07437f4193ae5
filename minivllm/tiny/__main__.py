"""Command line of the recipe: `python -m minivllm.tiny generate|tokenizer|train|evaluate|export`.

Only reads arguments and calls the modules beside it, importing each one when it is needed:
`--help` and `generate` work without transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def _generate(args: argparse.Namespace) -> None:
    from minivllm.tiny.generate import generate_stories

    counts = generate_stories(
        args.out, args.count, args.model, args.seed, args.batch, args.temperature
    )
    print(json.dumps(counts, indent=1))


def _tokenizer(args: argparse.Namespace) -> None:
    from minivllm.tiny import data
    from minivllm.tiny.tokenizer import save_tokenizer, train_tokenizer

    stories = data.read_stories(args.stories)
    tokenizer = train_tokenizer(data.corpus(stories, args.told // 4, args.seed), args.vocab)
    save_tokenizer(tokenizer, args.out)
    # Another seed than the corpus: else the first told stories would be those the BPE has seen.
    streams = data.build(stories, tokenizer, args.told, args.passes, args.seed + 1)
    counts = data.save_streams(streams, Path(args.out) / "streams.npz")
    (Path(args.out) / "counts.json").write_text(json.dumps(counts, indent=1))
    print(json.dumps(counts, indent=1))


def _train(args: argparse.Namespace) -> None:
    from minivllm.tiny.train import Shape, Training, train

    shape = Shape(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=args.intermediate,
    )
    training = Training(
        plan=args.plan,
        seed=args.seed,
        lr=args.lr,
        tokens_per_step=args.tokens_per_step,
        max_steps=args.max_steps,
        eval_every=args.eval_every,
    )
    print(json.dumps(train(args.data, args.out, shape, training, args.stop_at), indent=1))


def _evaluate(args: argparse.Namespace) -> None:
    from minivllm.tiny.evaluate import Judge, evaluate, sample

    if args.samples_only:
        rows = sample(Judge(args.model), args.samples, args.temperature, args.seed)["texts"]
        for row in rows:
            print(f"[seed {row['seed']}, {'ended' if row['ended'] else 'cut'}] {row['text']}\n")
        return
    report = evaluate(args.model, args.data, args.samples, args.temperature, args.seed)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    print(text)


def _export(args: argparse.Namespace) -> None:
    from minivllm.tiny.export import export

    files = export(args.run_dir, args.tokenizer, args.report, args.out, args.reading, args.stories)
    print(json.dumps(files, indent=1))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all five steps."""
    parser = argparse.ArgumentParser(
        prog="python -m minivllm.tiny", description=__doc__.split("\n")[0]
    )
    steps = parser.add_subparsers(dest="step", required=True)

    step = steps.add_parser(
        "generate", help="let SmolLM2 write stories from the plot grammar, filtered"
    )
    step.add_argument("--out", required=True, help="the .jsonl file to append to")
    step.add_argument(
        "--count", type=int, default=20, help="requests to make (a CPU writes about one in 5 s)"
    )
    step.add_argument("--model", default="smollm2", help="teacher: a name or a directory")
    step.add_argument("--seed", type=int, default=1)
    step.add_argument(
        "--batch", type=int, default=16, help="requests given to the engine at a time"
    )
    step.add_argument("--temperature", type=float, default=0.7)
    step.set_defaults(run=_generate)

    step = steps.add_parser("tokenizer", help="train the tokenizer and encode all data with it")
    step.add_argument(
        "--stories", required=True, help="directory with the generated .jsonl(.xz) parts"
    )
    step.add_argument("--out", required=True, help="directory for tokenizer.json and streams.npz")
    step.add_argument("--vocab", type=int, default=2048)
    step.add_argument(
        "--told", type=int, default=40000, help="stories told directly by the grammar"
    )
    step.add_argument("--passes", type=int, default=8, help="encoded passes over all answers")
    step.add_argument("--seed", type=int, default=1)
    step.set_defaults(run=_tokenizer)

    step = steps.add_parser("train", help="train the model; resumes from the checkpoint in --out")
    step.add_argument("--data", required=True, help="streams.npz of the tokenizer step")
    step.add_argument("--out", required=True, help="directory for checkpoint, weights and curve")
    step.add_argument("--plan", default="main", help="phases and stream weights (packing.PLANS)")
    step.add_argument("--vocab", type=int, default=2048)
    step.add_argument("--hidden", type=int, default=256)
    step.add_argument("--layers", type=int, default=6)
    step.add_argument("--intermediate", type=int, default=640)
    step.add_argument("--seed", type=int, default=1)
    step.add_argument("--lr", type=float, default=3e-3)
    step.add_argument("--tokens-per-step", type=int, default=32768)
    step.add_argument("--max-steps", type=int, default=0, help="0: as the plan says")
    step.add_argument(
        "--stop-at", type=int, default=0, help="leave a checkpoint at this step and end"
    )
    step.add_argument("--eval-every", type=int, default=100)
    step.set_defaults(run=_train)

    step = steps.add_parser("evaluate", help="perplexity, samples, answers and greedy margins")
    step.add_argument("--model", default=str(Path(__file__).parent / "model"))
    step.add_argument("--data", default=None, help="streams.npz, for perplexity beside n-grams")
    step.add_argument("--samples", type=int, default=24)
    step.add_argument("--temperature", type=float, default=0.7)
    step.add_argument("--seed", type=int, default=0, help="seed of the first sample")
    step.add_argument("--out", default=None, help="also write the report here")
    step.add_argument("--samples-only", action="store_true", help="print the samples as text")
    step.set_defaults(run=_evaluate)

    step = steps.add_parser("export", help="write the package data with its model card")
    step.add_argument("--run-dir", required=True, help="directory of the training")
    step.add_argument("--tokenizer", required=True, help="directory of the tokenizer step")
    step.add_argument("--report", required=True, help="report of the evaluate step")
    step.add_argument("--reading", required=True, help="what a reader says: '21 of 24'")
    step.add_argument("--stories", default=None, help="the story parts, for their hashes")
    step.add_argument("--out", default=str(Path(__file__).parent / "model"))
    step.set_defaults(run=_export)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run one step."""
    args = build_parser().parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
