"""The command `minivllm`: one parser, one exit code, one line for whatever goes wrong.

Owns the list of commands and what becomes of errors: bad input is `minivllm: error: ...` with exit
code 2 and no traceback. Each command's work is in the module it names, imported when it runs, so
that `--help` answers without torch. Serves chapter 00.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from minivllm.cli.parser import build_parser, parse

# What bad input, a bad file, a missing package or too little memory raises. Anything else is a
# fault of ours, and its traceback is worth more than a short line.
KNOWN_ERRORS = (ValueError, TypeError, OSError, ImportError, MemoryError)
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where a closed pipe is still ours to handle
        return code
    except SystemExit as error:  # argparse ends so after --help and after a wrong argument
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `minivllm ... | head`: the reader has seen enough. Python flushes stdout once more at
        # exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, not imported here
        if os.environ.get("MINIVLLM_DEBUG") or not (
            isinstance(error, KNOWN_ERRORS) or out_of_memory
        ):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"minivllm: error: {text}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    # Model text is any Unicode; a terminal that cannot show a character must not end the command.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    args = parse(build_parser(arguments), arguments)
    level = logging.INFO if getattr(args, "verbose", False) else logging.WARNING
    logging.basicConfig(format="minivllm: %(message)s", level=logging.WARNING)
    logging.getLogger("minivllm").setLevel(level)
    return int(args.run(args))


__all__ = ["main"]
