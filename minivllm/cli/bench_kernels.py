"""`minivllm bench kernels`: every Triton kernel against the limit that binds it.

Owns what this command prints; `minivllm.bench.kernels` measures.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from minivllm.cli.text import check_writable, print_json


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    check_writable(args.json)
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench kernels measures GPU kernels, and torch sees no CUDA device")
    from minivllm.bench import kernels  # late: imports triton

    # With the record on stdout, what is printed on the way goes beside it.
    aside = sys.stderr if args.json == "-" else sys.stdout
    with torch.inference_mode(), contextlib.redirect_stdout(aside):
        record = kernels.run()
    if args.json:
        print_json(record, args.json)
    return 0
