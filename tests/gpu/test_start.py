"""What an engine does before it is ready, so that no request has to wait for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_tools import engine, prompts, run

from minivllm import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("graphs")]


def variants() -> dict[str, int]:
    """Kernel -> how many forms of it this process has compiled, or loaded from Triton's cache."""
    from triton.runtime.jit import JITFunction

    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("minivllm.kernels."):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    found[kernel.__name__] = sum(len(c[0]) for c in kernel.device_caches.values())
    return found


def compiled_by_requests(path: str) -> dict[str, int]:
    """In a process of its own, for kernels are kept by process: forms added after the start."""
    llm = engine(Path(path), dtype="bfloat16")
    before = variants()
    kinds = [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
    ]
    batch = prompts()
    params = [SamplingParams(max_tokens=9, **kinds[i % 4]) for i in range(len(batch))]
    run(llm, batch, params)
    for kind in kinds:
        run(llm, batch[:1], SamplingParams(max_tokens=3, **kind))
        run(llm, batch[:7], SamplingParams(max_tokens=3, **kind))
    assert before["_sample_kernel"] > 0 and before["decode_kernel"] > 0
    return {
        name: n - before.get(name, 0) for name, n in variants().items() if n != before.get(name)
    }


def test_nothing_is_compiled_once_an_engine_is_ready(tiny_model) -> None:
    here = Path(__file__)
    script = "import json, test_start; print(json.dumps(test_start.compiled_by_requests(PATH)))"
    script = script.replace("PATH", repr(str(tiny_model("qwen3"))))
    paths = [str(here.parent), str(here.parents[1]), str(here.parents[2])]
    python_path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
