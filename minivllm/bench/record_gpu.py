"""Records what lessons show of a GPU: `python -m minivllm.bench.record_gpu --out DIR`.

Owns the list of parts, their time limits and the order: what matters most comes first, so that a
`--budget` cuts the rest. Each part is a child process: one that fails, hangs or takes the card down
with it costs its own file and no other. Never measures. Files: DIR/NAME.json, DIR/record.log.

`--small` with `--device cpu` runs the same commands in seconds, to test the recipe itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUDGET = 500.0  # seconds, all parts together
SMALL = ["--num-requests", "3", "--prompt-len", "4", "12", "--output-len", "2", "9"]


@dataclass(frozen=True, slots=True)
class Part:
    """One child: what it runs after `python -m`, and the seconds it may take."""

    name: str
    command: tuple[str, ...]
    seconds: float


def parts(out: Path, model: str, device: str, small: bool = False) -> list[Part]:
    """All parts in the order of their worth."""
    place = ["--model", model, "--device", device]
    sizes, repeats = (SMALL, "1") if small else ([], "3")

    def bench(name: str, seconds: float, *flags: str) -> Part:
        kind = name.split("_")[0]
        file = ["--json", str(out / f"{name}.json")]
        return Part(name, ("minivllm", "bench", kind, *place, *flags, *file), seconds)

    latency = ["--batch", "1", "2", "--context", "8", "--tokens", "3"] if small else []
    prefill = ["--length", "4", "9", "--max-num-seqs", "2"] if small else []
    stages = (
        ["--model", model, "--shape", model, "--lengths", "4", "--repeats", "1"] if small else []
    )
    return [
        bench("offline", 75, *sizes, "--repeat", repeats),
        # The same once more, for its start: all kernels are compiled now.
        bench("offline_again", 45, *sizes, "--repeat", "1"),
        bench("offline_fp8", 60, *sizes, "--repeat", repeats, "--kv-cache-dtype", "fp8"),
        bench("latency", 40, *latency),
        bench("prefill", 35, *prefill),
        bench("ladder", 240, *sizes),
        Part(
            "stages",
            ("minivllm.bench.record_stages", "--device", device, *stages)
            + ("--out", str(out / "stages.json")),
            70,
        ),
        # It has no model and no size; last, because its parts are printed one by one on the way.
        Part("kernels", ("minivllm", "bench", "kernels", "--json", str(out / "kernels.json")), 90),
    ]


def run_part(part: Part, seconds: float, log: Path) -> str:
    """Run one child within `seconds`; returns how it ended. What it prints goes to the log."""
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"\n==> {part.name}: {' '.join(part.command)}\n")
        stream.flush()
        child = subprocess.Popen(
            [sys.executable, "-m", *part.command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, so that its children end with it
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            # Also on Ctrl-C: a child of another session would go on without us.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return "ok" if code == 0 else f"failed with exit code {code}"


def drop_half_written(file: Path) -> None:
    """Remove a file that a child opened and did not finish: a lesson would stumble over it."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except ValueError:
        file.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 1 where one of them did not finish."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.bench.record_gpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--model", default="qwen3-0.6b-shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test of the recipe")
    args = parser.parse_args(argv)
    todo = parts(args.out, args.model, args.device, args.small)
    names = [part.name for part in todo]
    for name in args.parts or ():
        if name not in names:
            parser.error(f"--parts {name}: unknown; one of {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "record.log"
    log.write_text("", encoding="utf-8")
    ends, failed = time.monotonic() + args.budget, 0
    for part in todo:
        if args.parts and part.name not in args.parts:
            continue
        left, started = ends - time.monotonic(), time.monotonic()
        # A start alone takes some seconds: with less than that left, it is not begun.
        how = "not run: no time left" if left < 5 else run_part(part, min(part.seconds, left), log)
        if how != "ok":
            failed += 1
            drop_half_written(args.out / f"{part.name}.json")
        print(f"{part.name:12s} {how}, {time.monotonic() - started:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
