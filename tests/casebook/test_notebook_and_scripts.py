"""Where the engine is started from: plain scripts, several at once, notebooks. K05 K25 K32."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from casebook_tools import G, assert_clean, ids, make_llm, run

# What a newcomer writes: no function, no main guard. Sockets and children are counted at the end.
SCRIPT = """
from minivllm import LLM, SamplingParams
llm = LLM({path!r}, num_kvcache_blocks=16, device="cpu")
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
outputs = llm.generate([[1, 2, 3]], params, use_tqdm=False)
import json, psutil
me = psutil.Process()
print(json.dumps([
    outputs[0].outputs[0].token_ids,
    [c.status for c in me.net_connections()],
    len(me.children(recursive=True)),
]))
"""


def start(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def check(process: subprocess.Popen[str], expected: list[int], text: str | None = None) -> None:
    out, err = process.communicate(text, timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out) == [expected, [], 0], err
    assert err == "", "silent without a progress bar"


def test_k05_k25_scripts_of_every_form_at_once(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], tmp_path: Path
) -> None:
    """A file, -c, stdin and a module at the same time, with the usual ports taken."""
    path = tiny_model()
    code = SCRIPT.format(path=str(path))
    file = tmp_path / "plain_script.py"
    file.write_text(code)
    expected = reference(path).greedy([1, 2, 3], 4)
    with taken_ports(2333, 29500):
        processes = [
            (start([str(file)]), None),
            (start(["-c", code]), None),
            (start(["-"]), code),
            (start(["-m", "plain_script"], cwd=tmp_path), None),
        ]
        for process, text in processes:
            check(process, expected, text)


@contextmanager
def taken_ports(*ports: int) -> Iterator[None]:
    """Ports of rendezvous servers, bound by somebody else for as long as this lasts."""
    sockets = []
    try:
        for port in ports:
            taken = socket.socket()
            sockets.append(taken)
            try:
                taken.bind(("127.0.0.1", port))
                taken.listen()
            except OSError:  # somebody else has it: taken all the same
                continue
        yield
    finally:
        for taken in sockets:
            taken.close()


def test_k25_several_engines_in_one_process(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    first, second = tiny_model(), tiny_model("llama")
    one, two, three = make_llm(first), make_llm(second), make_llm(first)
    streams = [llm.stream([[1, 2, 3]], G(6)) for llm in (one, two, three)]
    texts: list[list[int]] = [[], [], []]
    for step in zip(*streams, strict=True):  # their steps interleaved
        for text, output in zip(texts, step):
            text.extend(output.outputs[0].token_ids)
    expected = [reference(p).greedy([1, 2, 3], 6) for p in (first, second, first)]
    assert texts == expected
    for llm in (one, two, three):
        assert_clean(llm)


def test_k25_two_threads_one_engine_is_refused(tiny_model: Callable[..., Path]) -> None:
    import threading

    llm = make_llm(tiny_model())
    stream = llm.stream([[1, 2, 3]], G(6))
    next(stream)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            llm.generate([[4]], G(1), use_tqdm=False)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread" in str(errors[0])
    assert len(list(stream)) == 5
    assert_clean(llm)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(run(llm, [[4]], G(3))))
    thread.start()
    thread.join()
    assert ids(results) == ids(run(llm, [[4]], G(3)))


# -- K32 ------------------------------------------------------------------------------------------

CELLS = [
    # 0: construct
    """from minivllm import LLM, SamplingParams
llm = LLM({path!r}, num_kvcache_blocks=16, device="cpu")
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)""",
    # 1: generate, silently
    "llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids",
    # 2: interrupt a step, then go on
    """step = llm.engine.runner.launch
def interrupted(plan):
    llm.engine.runner.launch = step
    raise KeyboardInterrupt
llm.engine.runner.launch = interrupted
try:
    llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", llm.engine.scheduler.block_manager.num_used, llm.has_unfinished())""",
    # 3: inside a running event loop
    """import asyncio
async def main():
    await asyncio.sleep(0)
    return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
await main()""",
    # 4: with the bar
    "o = llm.generate([[1, 2, 3], [4]], params)",
    # 5: streaming prints as it goes
    """for piece in llm.stream([[1, 2, 3]], params):
    print(len(piece.outputs[0].token_ids), end=" ")""",
]


def printed(outputs: list[Any]) -> str:
    """What a cell printed. A slow cell's text comes in several messages."""
    assert all(o.output_type == "stream" and o.name == "stdout" for o in outputs), outputs
    return "".join(o.text for o in outputs)


def test_k32_notebook_kernel(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    path = tiny_model()
    # Cells 0 and 1 twice, as somebody who runs the whole notebook again half-way.
    order = [0, 1, 0, 1, 2, 1, 3, 4, 5, 1]
    sources = [CELLS[i].format(path=str(path)) if i == 0 else CELLS[i] for i in order]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    expected = str(reference(path).greedy([1, 2, 3], 4))
    for i, cell in zip(order, notebook.cells):
        shown = cell.outputs
        if i == 0:
            assert shown == []
        elif i in (1, 3):
            assert [o.output_type for o in shown] == ["execute_result"], shown
            assert shown[0].data["text/plain"] == expected
        elif i == 2:
            assert printed(shown) == "interrupted 0 False\n"
        elif i == 4:
            text = "".join(o.get("text", str(o.get("data", ""))) for o in shown)
            assert "2/2" in text and "100%" in text and "Warning" not in text
        else:
            assert printed(shown) == "1 1 1 1 "


class Bare:
    """A stream of some notebook or GUI: write and flush, nothing else."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


class Refusing(io.StringIO):
    """A stream whose fileno is there, and raises."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


@pytest.mark.parametrize("kind", [Bare, Refusing, lambda: None], ids=["bare", "refusing", "none"])
def test_k32_streams_without_a_file(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[], Any],
) -> None:
    out, err = kind(), kind()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    llm = make_llm(tiny_model())
    loud = llm.generate([[1, 2], [3]], G(3))
    if err is not None:
        shown = err.text if isinstance(err, Bare) else err.getvalue()
        assert "2/2" in shown
        seen = len(shown)
    silent = llm.generate([[1, 2], [3]], G(3), use_tqdm=False)
    if err is not None:
        assert len(err.text if isinstance(err, Bare) else err.getvalue()) == seen
        assert (out.text if isinstance(out, Bare) else out.getvalue()) == ""
    assert ids(loud) == ids(silent)


def test_k32_the_bar_is_finished_and_off_means_off(
    tiny_model: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm(tiny_model())
    capfd.readouterr()
    run(llm, [[1, 2], [3]], G(3))
    list(llm.stream([[1, 2]], G(3)))
    llm.chat([{"role": "user", "content": "x"}], G(3), use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    llm.generate([[1, 2], [3], [4]], G(3))
    out, err = capfd.readouterr()
    assert out == ""
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert "100%" in last and "3/3" in last and "tok/s" in last
    with pytest.raises(ValueError):
        llm.generate([[1, 2], []], G(3))  # refused before any bar is drawn
    assert capfd.readouterr() == ("", "")


def test_k32_an_engine_is_released_with_its_name(tiny_model: Callable[..., Path]) -> None:
    import gc
    import weakref

    llm = make_llm(tiny_model())
    run(llm, [[1, 2, 3]], G(3))
    cache = weakref.ref(llm.engine.runner.kv_cache)  # type: ignore[attr-defined]
    llm = make_llm(tiny_model())  # the cell again: the first one's memory must go
    gc.collect()
    assert cache() is None
    assert len(ids(run(llm, [[1]], G(2)))[0]) == 2
