"""Loading, encoding and decoding, compared with transformers where it reads the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from minivllm.tokenizer import Tokenizer
from tokenizer_builders import CHATML, byte_level, llama2, save_dir

BOS = "<|endoftext|>"
CHAT = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "hello <b> & 世界 😀 "},
    {"role": "assistant", "content": "hell"},
    {"role": "user", "content": "a"},
]


def hf_tokenizer(path: Path) -> Any:
    """What transformers makes of the same directory."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(path))


def test_import_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, minivllm.tokenizer, minivllm.detokenizer, minivllm.chat_template\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_a_directory_needs_neither(tmp_path: Path) -> None:
    save_dir(tmp_path, byte_level(), eos_token="<|im_end|>", chat_template=CHATML)
    code = (
        "import sys; from minivllm.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_dir({str(tmp_path)!r})\n"
        "assert t.decode(t.encode_chat([{'role': 'user', 'content': 'a'}]))\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["", "a", "hello  world\n", "世界 😀 é", "<|im_end|> a", "\x00"])
def test_round_trip_byte_level(text: str) -> None:
    tok = Tokenizer(byte_level())
    assert tok.decode(tok.encode(text), skip_special_tokens=False) == text


def test_properties(tmp_path: Path) -> None:
    backend = byte_level()
    tok = Tokenizer.from_dir(save_dir(tmp_path, backend, bos_token=BOS, eos_token="<|im_end|>"))
    assert tok.vocab_size == 256 + 4 + 3
    assert (tok.bos_token, tok.bos_token_id) == (BOS, 260)
    assert (tok.eos_token, tok.eos_token_id) == ("<|im_end|>", 262)
    assert tok.chat_template is None
    assert tok.id_to_token(262) == "<|im_end|>" and tok.id_to_token(256) == "Ġa"
    plain = Tokenizer(byte_level())
    assert plain.bos_token is plain.bos_token_id is plain.eos_token is plain.eos_token_id is None


ADDED = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False}


@pytest.mark.parametrize(
    "value",
    ["<|im_end|>", ADDED, {"__type": "AddedToken", **ADDED, "single_word": False}],
    ids=["string", "dict", "typed_dict"],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_token_spellings(tmp_path: Path, value: Any, file: str) -> None:
    save_dir(tmp_path, byte_level())
    (tmp_path / file).write_text(json.dumps({"eos_token": value, "bos_token": None}))
    tok = Tokenizer.from_dir(tmp_path)
    assert (tok.eos_token, tok.eos_token_id) == ("<|im_end|>", 262)
    assert tok.bos_token is None
    template = "{{ eos_token }}{{ bos_token }}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "a"}]
    assert tok.render_chat(messages, chat_template=template) == "<|im_end|>a"


def test_eos_that_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    tok = Tokenizer.from_dir(save_dir(tmp_path, byte_level(), eos_token="</never>"))
    assert tok.eos_token == "</never>" and tok.eos_token_id is None
    assert tok.vocab_size == 263


def test_special_only_in_the_config(tmp_path: Path) -> None:
    # "hell" is an ordinary entry of tokenizer.json; the config makes it a special token.
    save_dir(tmp_path, byte_level(), eos_token="hell", extra_special_tokens=["he"])
    tok = Tokenizer.from_dir(tmp_path)
    assert tok.decode(tok.encode("ahella")) == "aa"
    assert tok.decode(tok.encode("ahea")) == "aa"
    hf = hf_tokenizer(tmp_path)
    for text in ("ahella", "hehell a", "xhe"):
        assert tok.encode(text) == hf.encode(text)
        assert tok.decode(tok.encode(text)) == hf.decode(hf.encode(text), skip_special_tokens=True)


def test_k61_added_tokens_decoder_of_the_config(tmp_path: Path) -> None:
    entry = {**ADDED, "content": "<tool>", "single_word": False, "special": False}
    listed = {"263": entry, "999": {**entry, "content": "<lost>"}}
    tok = Tokenizer.from_dir(save_dir(tmp_path, byte_level(), added_tokens_decoder=listed))
    assert tok.encode("<tool>") == [263] and tok.decode([263]) == "<tool>"
    assert tok.vocab_size == 264 and tok.id_to_token(999) is None


@pytest.mark.parametrize("skip", [True, False])
def test_k61_decode_of_ids_without_entry(skip: bool) -> None:
    for backend in (byte_level(), llama2()):
        tok = Tokenizer(backend)
        ids = tok.encode("hell a", add_special_tokens=False)
        want = tok.decode(ids, skip_special_tokens=skip)
        for bad in (tok.vocab_size, 10**6, 2**32, 2**70, -1):
            mixed = [bad, *ids, bad]
            assert tok.decode(mixed, skip_special_tokens=skip) == want
            assert tok.decode([bad], skip_special_tokens=skip) == ""
            assert tok.id_to_token(bad) is None
    assert tok.decode([]) == ""


def test_decode_equals_transformers(tmp_path: Path) -> None:
    for i, backend in enumerate((byte_level(bos=BOS), llama2())):
        path = save_dir(tmp_path / str(i), backend)
        tok, hf = Tokenizer.from_dir(path), hf_tokenizer(path)
        for text in ("", "hello the world", " a  a", "世a😀é\n"):
            ids = tok.encode(text)
            assert ids == hf.encode(text)
            for skip in (True, False):
                want = hf.decode(ids, skip_special_tokens=skip)
                assert tok.decode(ids, skip_special_tokens=skip) == want


def test_k64_exactly_one_bos(tmp_path: Path) -> None:
    path = save_dir(tmp_path, byte_level(bos=BOS), bos_token=BOS)
    tok = Tokenizer.from_dir(path)
    bos = tok.bos_token_id
    body = tok.encode("hello", add_special_tokens=False)
    assert bos not in body
    assert tok.encode("hello") == [bos, *body]
    assert tok.encode(BOS + "hello") == [bos, *body]
    assert tok.encode(BOS + "hello", add_special_tokens=False) == [bos, *body]
    # A BOS that is not at the front is the user's own business.
    assert tok.encode("hello" + BOS) == [bos, *body, bos]


def test_k64_bos_that_no_config_names() -> None:
    tok = Tokenizer(byte_level(bos=BOS))  # as with a directory that holds tokenizer.json alone
    assert tok.bos_token is None
    assert tok.encode(BOS + "hello") == tok.encode("hello")
    assert tok.encode("") == tok.encode(BOS) == [260]


def test_k64_no_bos_habit_means_no_bos(tmp_path: Path) -> None:
    tok = Tokenizer.from_dir(save_dir(tmp_path, byte_level(), bos_token=BOS))
    assert tok.bos_token_id not in tok.encode("hello")
    assert tok.encode(BOS + BOS) == [260, 260]  # two were written, none was added


def test_k21_empty_text(tmp_path: Path) -> None:
    with_bos = Tokenizer.from_dir(save_dir(tmp_path, byte_level(bos=BOS), bos_token=BOS))
    assert with_bos.encode("") == [260]
    assert with_bos.encode(BOS) == [260]
    assert with_bos.encode("", add_special_tokens=False) == []
    assert Tokenizer(byte_level()).encode("") == []


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("family", ["byte_level", "llama2"])
def test_k64_encode_chat_equals_transformers(
    tmp_path: Path, family: str, generation_prompt: bool
) -> None:
    bos, eos = (BOS, "<|im_end|>") if family == "byte_level" else ("<s>", "</s>")
    backend = byte_level(bos=BOS) if family == "byte_level" else llama2()
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = save_dir(tmp_path, backend, bos_token=bos, eos_token=eos, chat_template=template)
    tok, hf = Tokenizer.from_dir(path), hf_tokenizer(path)
    options: dict[str, Any] = {"add_generation_prompt": generation_prompt}
    want = hf.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
    text = hf.apply_chat_template(CHAT, tokenize=False, **options)
    assert tok.render_chat(CHAT, **options) == text
    assert tok.encode_chat(CHAT, **options) == want
    # The same text as a plain prompt gives the same ids: the template's BOS is not doubled.
    assert tok.encode(text) == want
    assert want[0] == tok.bos_token_id and want[1] != tok.bos_token_id


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("habit", [True, False])
def test_k64_tokenizer_json_outranks_add_bos_token(
    tmp_path: Path, add_bos: bool, habit: bool
) -> None:
    backend = byte_level(bos=BOS if habit else None)
    path = save_dir(tmp_path, backend, bos_token=BOS, add_bos_token=add_bos)
    tok, hf = Tokenizer.from_dir(path), hf_tokenizer(path)
    assert (tok.encode("hello")[0] == tok.bos_token_id) == habit
    for text in ("hello", "", "a世"):
        assert tok.encode(text) == hf.encode(text)


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tok = Tokenizer.from_dir(save_dir(tmp_path, backend))
    assert len(tok.encode("world")) == 5 and len(tok.encode("w" * 40)) == 40


def test_bad_text() -> None:
    tok = Tokenizer(byte_level())
    with pytest.raises(TypeError, match="list"):
        tok.encode(["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"text\[2\].*surrogate"):
        tok.encode("ab\ud83d")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model directory.*nowhere"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.from_dir(tmp_path)
    save_dir(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is no JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 5}')
    with pytest.raises(ValueError, match="eos_token must be a string.*5"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_dir(str(tmp_path)).vocab_size == 263


def test_directory_without_any_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="no usable tokenizer in"):
        Tokenizer.from_dir(tmp_path)


def test_older_format_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    saved = json.loads(byte_level().to_str())["model"]
    vocab = {**saved["vocab"], BOS: 260, "<|im_end|>": 261}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [m if isinstance(m, str) else " ".join(m) for m in saved["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": BOS, "eos_token": "<|im_end|>"}
    config["chat_template"] = CHATML
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tok = Tokenizer.from_dir(tmp_path)
    assert (tok.bos_token_id, tok.eos_token_id) == (260, 261)
    assert tok.chat_template == CHATML
    assert tok.decode(tok.encode("hello 世界 a")) == "hello 世界 a"
    assert tok.encode("hello", add_special_tokens=False) == Tokenizer(byte_level()).encode("hello")


def test_special_tokens_with_flags_survive(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<pad>", lstrip=True, rstrip=True, special=True)])
    tok = Tokenizer.from_dir(save_dir(tmp_path, backend, pad_token="<pad>"))
    assert tok.decode(tok.encode("a <pad> a")) == "aa"
