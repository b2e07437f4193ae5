"""From ids to text and from text to ids, through the engine: K61 K63 K64, and stop strings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer

from casebook_tools import SP, G, assert_clean, ids, make_llm, run, script
from minivllm import LLM, SamplingParams
from tiny_models import assert_greedy
from tokenizer_builders import byte_ids, byte_level, llama2, save_dir

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
BACKENDS = {"byte_level": byte_level, "llama2": llama2, "metaspace": lambda: llama2("metaspace")}
BYTES = ["byte_level", "llama2"]  # those whose byte tokens join to characters


def scripted(path: Path, texts: Any, prompt_len: int, **options: Any) -> LLM:
    return make_llm(path, parts={"sample": script(texts, prompt_len)}, **options)


def stream_text(llm: LLM, prompt: Any, params: SamplingParams) -> list[str]:
    """The pieces of one request's first sample."""
    pieces = [output.outputs[0].text for output in llm.stream([prompt], params)]
    assert_clean(llm)
    return pieces


# -- K61 ------------------------------------------------------------------------------------------


@DEPTHS
def test_k61_ids_without_an_entry(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    # The model has 320 rows, the tokenizer 258 entries; random weights sample both kinds.
    path = tiny_model()
    llm = make_llm(path, depth=depth)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.vocab_size == 258
    outputs = run(llm, ["ab", "cd"], [G(24, logprobs=3, prompt_logprobs=1), G(24)])
    assert len(outputs) == 2 and any(t >= 258 for text in ids(outputs) for t in text)
    for output in outputs:
        sample = output.outputs[0]
        known = [t for t in sample.token_ids if t < 258]
        assert sample.text == tokenizer.decode(sample.token_ids) == tokenizer.decode(known)
        assert "".join(stream_text(llm, output.prompt, G(24))) == sample.text
    for entry in outputs[0].outputs[0].logprobs or []:
        for token, item in entry.items():
            assert (item.decoded_token == "") == (token >= 258)
    prompts = [output.prompt_token_ids for output in outputs]
    assert_greedy(reference(path), prompts, ids(outputs))


@pytest.mark.parametrize("token", [258, 310, 319])
def test_k61_nothing_but_unknown_ids(tiny_model: Callable[..., Path], token: int) -> None:
    llm = scripted(tiny_model(), [token] * 6, 2)
    outputs = run(llm, ["ab", "cd"], G(6, stop=["x"]))
    assert [o.outputs[0].text for o in outputs] == ["", ""]
    assert ids(outputs) == [[token] * 6] * 2
    assert stream_text(llm, "ab", G(6)) == [""] * 6
    # As a prompt they are ids like any others.
    assert len(run(make_llm(tiny_model()), [[token] * 3], G(2))) == 1


def test_k61_unknown_ids_inside_a_character(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    backend = Backend.from_file(str(path / "tokenizer.json"))
    data = byte_ids(backend, "é世😀".encode())
    mixed = [t for byte in data for t in (300, byte, 319)]
    llm = scripted(path, mixed, 1)
    assert run(llm, [[1]], G(len(mixed)))[0].outputs[0].text == "é世😀"
    assert [p for p in stream_text(llm, [1], G(len(mixed))) if p] == ["é", "世", "😀"]


def test_k61_added_tokens_above_the_base_vocabulary(tiny_model: Callable[..., Path]) -> None:
    llm = scripted(tiny_model(), [64, 256, 65, 257], 1)
    shown = run(llm, [[1]], G(4, skip_special_tokens=False))[0].outputs[0].text
    assert shown == "a<|im_start|>b<|im_end|>"
    assert run(llm, [[1]], G(4))[0].outputs[0].text == "ab"
    assert run(llm, [[1]], G(4, detokenize=False))[0].outputs[0].text == ""


# -- K63 ------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("kind", BYTES)
def test_k63_one_byte_a_token(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], kind: str, depth: int
) -> None:
    path = save_dir(copy_model(tiny_model()), BACKENDS[kind]())
    backend = Backend.from_file(str(path / "tokenizer.json"))
    text = "A 世a😀é"
    if kind == "byte_level":
        tokens = byte_ids(backend, text.encode())
    else:
        tokens = [backend.token_to_id("a")]
        tokens += [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        text = "a" + text
    llm = scripted(path, tokens, 1, depth=depth)
    assert run(llm, [[1]], G(len(tokens)))[0].outputs[0].text == text
    pieces = stream_text(llm, [1], G(len(tokens)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    # Cut anywhere: what decode() says, and the streamed pieces joined are the same.
    tokenizer = llm.get_tokenizer()
    for count in range(1, len(tokens)):
        cut = run(llm, [[1]], G(count))[0].outputs[0]
        assert cut.text == tokenizer.decode(tokens[:count])
        pieces = stream_text(llm, [1], G(count))
        assert "".join(pieces) == cut.text
        assert not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", BACKENDS)
def test_k63_random_ids_joined_equal_decode(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], kind: str, skip: bool
) -> None:
    path = save_dir(copy_model(tiny_model()), BACKENDS[kind]())
    rng = random.Random(4)
    texts: dict[int, list[int]] = {}
    for index in range(40):
        texts[index] = [rng.randrange(320) for _ in range(20)]
    llm = scripted(path, texts, 1, num_kvcache_blocks=400, max_num_seqs=40)
    tokenizer = llm.get_tokenizer()
    params = G(20, n=40, skip_special_tokens=skip)
    output = run(llm, [[1]], params)[0]
    streamed = dict.fromkeys(range(40), "")
    for piece in llm.stream([[1]], params):
        for sample in piece.outputs:
            streamed[sample.index] += sample.text
    for sample in output.outputs:
        assert sample.token_ids == texts[sample.index]
        assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=skip)
        assert streamed[sample.index] == sample.text


def test_k63_two_streams_do_not_mix(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    backend = Backend.from_file(str(path / "tokenizer.json"))
    texts = {0: byte_ids(backend, "é世😀!".encode()), 1: byte_ids(backend, "世é!😀".encode())}
    llm = scripted(path, texts, 1)
    got = {0: "", 1: ""}
    for piece in llm.stream([[1]], G(10, n=2)):
        for sample in piece.outputs:
            got[sample.index] += sample.text
    assert got == {0: "é世😀!", 1: "世é!😀"}


# -- stop strings over token and character boundaries (K63's neighbours) --------------------------


@DEPTHS
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ("c", "ab"),
        ("bcd", "a"),
        (["zzz", "de"], "abc"),
        ("世", "abcde"),
        ("e世😀", "abcd"),
        ("\n", "abcde世😀"),
        ("h", "abcde世😀\n"),
        ("abcd", ""),
        ("nothing", "abcde世😀\nh"),
    ],
)
def test_k63_stop_strings(
    tiny_model: Callable[..., Path],
    copy_model: Callable[..., Path],
    kind: str,
    stop: Any,
    kept: str,
    depth: int,
) -> None:
    path = save_dir(copy_model(tiny_model()), BACKENDS[kind]())
    backend = Backend.from_file(str(path / "tokenizer.json"))
    text = "abcde世😀\nh"
    if kind == "byte_level":
        tokens = byte_ids(backend, text.encode())
    else:
        tokens = []
        for char in text:
            known = backend.token_to_id(char)
            tokens += (
                [known]
                if known is not None
                else [backend.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
            )
    tokens = [*tokens, tokens[0], tokens[0]]
    llm = scripted(path, tokens, 1, depth=depth)
    count = len(tokens) - 2
    output = run(llm, [[1]], G(count, stop=stop))[0].outputs[0]
    assert output.text == kept
    found = stop if stop != ["zzz", "de"] else "de"
    if found == "nothing":
        assert (output.finish_reason, output.token_ids) == ("length", tokens[:count])
        return
    assert (output.finish_reason, output.stop_reason) == ("stop", found)
    # The tokens that made the match are kept, and none is generated behind them.
    tokenizer = llm.get_tokenizer()
    needed = next(n for n in range(1, count + 1) if found in tokenizer.decode(tokens[:n]))
    assert output.token_ids == tokens[:needed]
    pieces = stream_text(llm, [1], G(count, stop=stop))
    assert "".join(pieces) == kept
    included = run(llm, [[1]], G(count, stop=stop, include_stop_str_in_output=True))[0].outputs[0]
    assert included.text == kept + found


# -- K64 ------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def with_bos(path: Path, template: str | None = TEMPLATE) -> Path:
    """Give a directory a tokenizer that puts BOS in front, and a template that writes it too."""
    file = path / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.add_special_tokens(["<s>"])
    bos = backend.token_to_id("<s>")
    assert bos == 258
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", bos)]
    )
    backend.save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


MESSAGES = [{"role": "user", "content": "hi <there>"}, {"role": "system", "content": "世 x"}]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_k64_exactly_one_bos(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], template: str
) -> None:
    path = with_bos(copy_model(tiny_model()), template)
    llm = make_llm(path, num_kvcache_blocks=100)
    theirs = AutoTokenizer.from_pretrained(path)
    want = theirs.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    output = run_chat(llm, MESSAGES)
    assert output.prompt_token_ids == want
    assert want.count(258) == (1 if "bos" in template else 0)
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert output.prompt == text
    # The rendered text by hand, and plain text: one BOS each, whoever wrote it.
    outputs = run(llm, [text, "plain", "<s>plain"], G(2))
    assert [o.prompt_token_ids.count(258) for o in outputs] == [1, 1, 1]
    assert outputs[1].prompt_token_ids == outputs[2].prompt_token_ids
    if "bos" in template:
        assert outputs[0].prompt_token_ids == want


def run_chat(llm: LLM, messages: Any) -> Any:
    outputs = llm.chat(messages, G(3), use_tqdm=False)
    assert_clean(llm)
    assert len(outputs) == 1
    return outputs[0]


def test_k64_k21_a_bos_makes_the_empty_text_a_prompt(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], copy_model: Callable[..., Path]
) -> None:
    llm = make_llm(with_bos(copy_model(tiny_model())))
    outputs = run(llm, ["", "<s>"], G(3))
    assert [o.prompt_token_ids for o in outputs] == [[258], [258]]
    assert ids(outputs) == [reference(tiny_model()).greedy([258], 3)] * 2
    assert len(run(llm, "", G(1))) == 1
    with pytest.raises(ValueError, match="prompt 0"):
        llm.generate([[]], G(1))


def test_k64_ids_are_used_as_they_are(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    llm = make_llm(with_bos(copy_model(tiny_model())))
    for prompt in ([258, 258, 5], [5], [258]):
        assert run(llm, [prompt], G(1))[0].prompt_token_ids == prompt


def test_k64_chat_without_a_template_and_without_a_tokenizer(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    path = with_bos(copy_model(tiny_model()), None)
    llm = make_llm(path)
    with pytest.raises(ValueError, match="chat template"):
        llm.chat(MESSAGES, G(1))
    given = llm.chat(MESSAGES, G(1), use_tqdm=False, chat_template=TEMPLATE)
    assert given[0].prompt_token_ids.count(258) == 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    llm = make_llm(path)
    for call in (lambda: llm.chat(MESSAGES, G(1)), lambda: llm.generate("x", G(1))):
        with pytest.raises(ValueError, match="no tokenizer"):
            call()
    assert_clean(llm)
    assert run(llm, [[1, 2]], SP(seed=1))[0].outputs[0].text == ""


def test_k64_several_conversations_keep_their_order(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model(), num_kvcache_blocks=200)
    talks = [[{"role": "user", "content": c * 3}] for c in "abc"]
    outputs = llm.chat(talks, [G(1), G(2), G(3)], use_tqdm=False)
    assert [len(text) for text in ids(outputs)] == [1, 2, 3]
    assert [f"{c * 3}" in (o.prompt or "") for c, o in zip("abc", outputs)] == [True] * 3
    alone = [llm.chat(talk, G(3), use_tqdm=False)[0] for talk in talks]
    assert [o.prompt_token_ids for o in alone] == [o.prompt_token_ids for o in outputs]
