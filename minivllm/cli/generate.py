"""`minivllm generate`: prompts in, text and a line of numbers out.

Owns what this command prints. Never computes: `LLM.generate` and `LLM.chat` do. Serves chapter 00.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from minivllm.cli.loading import Prepared, Timing, load, prepare
from minivllm.cli.text import kv_line, kv_use, print_json, styled
from minivllm.outputs import RequestOutput

if TYPE_CHECKING:
    from minivllm.llm import LLM

QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Explain what a cache is to a child.",
    "Name three uses of a paper clip.",
)
OPENINGS = (
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tom had a red ball.",
    "The cat was sad because",
)
CUT = " [...]"  # ends a text that --max-tokens cut


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    prepared, timing = prepare(args), Timing()
    prompts = read_prompts(args.prompts)
    llm = load(prepared, timing)
    chat = wants_chat(args.chat, prepared, llm)
    if args.system and not chat:
        raise ValueError("--system needs --chat: without a template there is no system message")
    prompts = prompts or list(QUESTIONS if chat else OPENINGS)
    with timing.measure("generate"):
        outputs = _generate(llm, prompts, chat, prepared, args)
    if args.json:
        print_json(_as_json(prepared, llm, prompts, outputs, timing))
    else:
        _print(prompts, outputs)
        print(_summary(llm, outputs, timing))
        if args.timing:
            print(timing.line())
    return 0


def read_prompts(words: list[str]) -> list[str]:
    """The prompts of the command line; "-" stands for all of stdin."""
    return [sys.stdin.read().rstrip("\n") if word == "-" else word for word in words]


def wants_chat(asked: bool | None, prepared: Prepared, llm: LLM) -> bool:
    """--chat or --no-chat; else: the model has a template and is no story teller."""
    if asked is not None:
        return asked
    return llm.get_tokenizer().chat_template is not None and not prepared.continues_stories


def _generate(
    llm: LLM, prompts: list[str], chat: bool, prepared: Prepared, args: argparse.Namespace
) -> list[RequestOutput]:
    show = sys.stderr.isatty()
    if not chat:
        return llm.generate(prompts, prepared.params, use_tqdm=show)
    system = [{"role": "system", "content": args.system}] if args.system else []
    conversations = [[*system, {"role": "user", "content": text}] for text in prompts]
    return llm.chat(
        conversations,
        prepared.params,
        use_tqdm=show,
        chat_template_kwargs=args.chat_template_kwargs,
    )


def _print(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        print(styled(f"> {prompt}", "1"))
        for sample in output.outputs:
            number = f"({sample.index + 1}) " if len(output.outputs) > 1 else ""
            cut = styled(CUT, "2") if sample.finish_reason == "length" else ""
            print(f"{number}{sample.text.strip()}{cut}")
        print()


def _summary(llm: LLM, outputs: list[RequestOutput], timing: Timing) -> str:
    stats, seconds = llm.stats, timing.seconds["generate"]
    prompts = "1 prompt" if len(outputs) == 1 else f"{len(outputs)} prompts"
    return (
        f"{prompts}, {stats.generated_tokens:,} tokens in {seconds:.1f} s: "
        f"{stats.generated_tokens / seconds:,.1f} tokens/s\n{kv_line(stats)}"
    )


def _as_json(
    prepared: Prepared,
    llm: LLM,
    prompts: list[str],
    outputs: list[RequestOutput],
    timing: Timing,
) -> dict[str, Any]:
    stats, seconds = llm.stats, timing.seconds["generate"]
    return {
        "model": prepared.name,
        "requests": [
            {
                "prompt": prompt,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "num_cached_tokens": output.num_cached_tokens,
                "ttft_s": output.metrics.time_to_first_token if output.metrics else None,
                "outputs": [
                    {
                        "text": sample.text,
                        "token_ids": sample.token_ids,
                        "finish_reason": sample.finish_reason,
                        "stop_reason": sample.stop_reason,
                    }
                    for sample in output.outputs
                ],
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "generated_tokens": stats.generated_tokens,
        "tokens_per_s": stats.generated_tokens / seconds,
        "kv_cache": kv_use(stats),
        "seconds": timing.seconds,
    }
