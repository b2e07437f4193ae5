"""Chat templates: where they are found, what they see, what is refused and how."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from minivllm.chat_template import ChatTemplate
from minivllm.tokenizer import Tokenizer
from tokenizer_builders import CHATML, byte_level, save_dir

USER = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather's state in <city> & é世",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# One template with most of what published ones use.
RICH = """\
{%- set ns = namespace(first=true) %}
{{- bos_token }}
{%- if tools %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- (tools | tojson(indent=2)) ~ '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' ~ message.role) }}
    {%- endif %}
    {%- if loop.index0 > 6 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{- message.content or 'none' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def make(template: object = CHATML, **special: str) -> Tokenizer:
    """A byte-level tokenizer with one template (or a dict of them)."""
    templates = template if isinstance(template, dict) else {"default": template}
    return Tokenizer(byte_level(), special_tokens=special, chat_templates=templates)


def hf_render(path: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    auto = pytest.importorskip("transformers").AutoTokenizer
    return auto.from_pretrained(str(path)).apply_chat_template(messages, tokenize=False, **options)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": USER,
    "blanks": [{"role": "user", "content": "  a \n"}, {"role": "assistant", "content": " b  "}],
    "tool_call": [
        {"role": "system", "content": "be <brief> & 'kind'"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Zürich", "n": 1.5}}}],
        },
        {"role": "tool", "content": '{"t": 3}'},
    ],
    "long": [{"role": "user", "content": str(i)} for i in range(9)],
}


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"enable_thinking": False}])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_k64_render_equals_transformers(
    tmp_path: Path, name: str, options: dict[str, Any], prompt: bool
) -> None:
    path = save_dir(tmp_path, byte_level(), bos_token="<|endoftext|>", chat_template=RICH)
    options = {"add_generation_prompt": prompt, **options}
    want = hf_render(path, CONVERSATIONS[name], **options)
    assert want.startswith("<|endoftext|>")
    assert Tokenizer.from_dir(path).render_chat(CONVERSATIONS[name], **options) == want


def test_template_as_string(tmp_path: Path) -> None:
    tok = Tokenizer.from_dir(save_dir(tmp_path, byte_level(), chat_template=CHATML))
    assert tok.chat_template == CHATML
    want = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tok.render_chat(USER) == want
    assert tok.render_chat(USER, add_generation_prompt=False) + "<|im_start|>assistant\n" == want


def test_template_as_list_of_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
        {"name": "rag", "template": "R{{ messages[0].content }}"},
    ]
    path = save_dir(tmp_path, byte_level(), chat_template=named)
    tok = Tokenizer.from_dir(path)
    assert tok.chat_template == named[0]["template"]
    assert tok.render_chat(USER) == "Dhello" == hf_render(path, USER)
    assert tok.render_chat(USER, tools=[TOOL]) == "T1" == hf_render(path, USER, tools=[TOOL])
    assert tok.render_chat(USER, chat_template="rag") == "Rhello"
    assert tok.render_chat(USER, chat_template="rag", tools=[TOOL]) == "Rhello"
    with pytest.raises(ValueError, match=r"'rga' is neither .*'default', 'rag', 'tool_use'"):
        tok.render_chat(USER, chat_template="rga")


def test_named_templates_without_default() -> None:
    tok = make({"rag": "R{{ 1 }}"})
    assert tok.chat_template is None
    with pytest.raises(ValueError, match=r"no default chat template.*'rag'"):
        tok.render_chat(USER)


@pytest.mark.parametrize("bad", [5, ["x"], [{"name": "default"}]])
def test_template_entry_of_a_wrong_kind(tmp_path: Path, bad: object) -> None:
    with pytest.raises(ValueError, match="template"):
        Tokenizer.from_dir(save_dir(tmp_path, byte_level(), chat_template=bad))


def test_template_files(tmp_path: Path) -> None:
    path = save_dir(tmp_path, byte_level())
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json{{ 1 }}"}))
    assert Tokenizer.from_dir(path).render_chat(USER) == "json1"
    save_dir(path, byte_level(), chat_template="config{{ 1 }}")
    assert Tokenizer.from_dir(path).render_chat(USER) == "config1"
    (path / "chat_template.jinja").write_text("jinja {{ messages[0].content }} é\n", "utf-8")
    assert Tokenizer.from_dir(path).render_chat(USER) == "jinja hello é" == hf_render(path, USER)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ 1 }}")
    assert Tokenizer.from_dir(path).render_chat(USER, tools=[TOOL]) == "T1"
    assert hf_render(path, USER, tools=[TOOL]) == "T1"


def test_template_as_argument_outranks_the_files() -> None:
    tok = make("file{{ 1 }}")
    assert tok.render_chat(USER, chat_template="mine {{ messages | length }}") == "mine 1"
    with pytest.raises(TypeError, match="chat_template must be a str, got int"):
        tok.render_chat(USER, chat_template=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", [None, ""])
def test_no_template(tmp_path: Path, empty: object) -> None:
    tok = Tokenizer.from_dir(save_dir(tmp_path, byte_level(), chat_template=empty))
    with pytest.raises(ValueError, match="no chat template"):
        tok.render_chat(USER)
    with pytest.raises(ValueError, match="no chat template"):
        tok.encode_chat(USER)
    assert tok.render_chat(USER, chat_template=CHATML)


def test_special_tokens_and_variables_are_visible() -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ mood }}|{{ documents }}|{{ pad_token }}|"
    tok = make(template, bos_token="<s>", eos_token="</s>")
    assert tok.render_chat(USER, mood="gay") == "<s>|</s>|gay|None||"
    assert tok.render_chat(USER, bos_token="<b>") == "<b>|</s>||None||"


def test_tools_are_plain_json() -> None:
    tok = make("{% for t in tools %}{{ t | tojson }}{% endfor %}")
    text = tok.render_chat(USER, tools=[TOOL])
    assert json.loads(text) == TOOL
    assert "<city> & é世" in text and "'" in text  # neither HTML nor ASCII escapes
    with pytest.raises(TypeError, match=r"tools\[1\].*function"):
        tok.render_chat(USER, tools=[TOOL, lambda: 0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="tools must be a list.*dict"):
        tok.render_chat(USER, tools=TOOL)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be JSON data, got object"):
        tok.render_chat(USER, tools=[{"a": [object()]}])


def test_strftime_now() -> None:
    assert make("{{ strftime_now('%Y') }}").render_chat(USER) in {
        str(datetime.now().year - 1),
        str(datetime.now().year),
    }


def test_generation_block_is_a_scope(tmp_path: Path) -> None:
    template = "{% generation %}{% set x = 1 %}[{{ x }}]{% endgeneration %}({{ x }})"
    path = save_dir(tmp_path, byte_level(), chat_template=template)
    assert Tokenizer.from_dir(path).render_chat(USER) == "[1]()" == hf_render(path, USER)


def test_block_whitespace(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n"
    template += "    {% endif %}\n  {# note #}\n{% endfor %}\nend"
    path = save_dir(tmp_path, byte_level(), chat_template=template)
    assert Tokenizer.from_dir(path).render_chat(USER) == "hello\nend" == hf_render(path, USER)


def test_raise_exception_is_a_value_error_with_its_text() -> None:
    tok = make("{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}")
    with pytest.raises(ValueError, match="refused.*Roles must alternate: user"):
        tok.render_chat(USER)
    assert make().render_chat(USER)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(a=1) }}", "SecurityError"),
    ],
)
def test_failing_template_is_a_value_error(template: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"template failed: {text}"):
        make(template).render_chat(USER)


@pytest.mark.parametrize("source", ["{% if %}", "a\n{{ x | nofilter }}", "{% for x in y %}"])
def test_syntax_error_gives_the_line(source: str) -> None:
    with pytest.raises(ValueError, match=r"chat template, line \d: "):
        ChatTemplate(source)


BAD_MESSAGES: list[tuple[object, type[Exception], str]] = [
    ("hello", TypeError, "messages must be a list of dicts, got str"),
    (USER[0], TypeError, "messages must be a list of dicts, got dict"),
    (None, TypeError, "got NoneType"),
    ([], ValueError, "messages is empty"),
    ([*USER, "hello"], TypeError, r"messages\[1\] must be a dict .* got str"),
    ([*USER, ("user", "x")], TypeError, r"messages\[1\].*tuple"),
    ([USER], TypeError, r"messages\[0\].*list"),
    ([*USER, {"content": "x"}], ValueError, r"messages\[1\] has no 'role'"),
    ([*USER, {"role": None, "content": "x"}], ValueError, r"messages\[1\] has no 'role'"),
    ([*USER, {"role": 3, "content": "x"}], TypeError, r"messages\[1\]\['role'\].*3"),
    ([*USER, {"role": "user"}], ValueError, r"messages\[1\] has no 'content'"),
    ([*USER, {"role": "user", "content": None}], ValueError, r"messages\[1\] has no 'content'"),
    ([*USER, {"role": "user", "content": 5}], TypeError, r"messages\[1\]\['content'\].*int"),
    ([*USER, {"role": "user", "content": {}}], TypeError, r"messages\[1\]\['content'\].*dict"),
    ([{"role": "user", "content": ["x"]}], TypeError, r"messages\[0\]\['content'\]\[0\].*'x'"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
        ValueError,
        r"messages\[0\]\['content'\]\[1\] is no text part .*'image'",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], ValueError, r"\[0\] is no text part"),
    ([{"role": "user", "content": "a", "x": object()}], TypeError, r"messages\[0\]\['x'\].*object"),
]


@pytest.mark.parametrize(("messages", "error", "text"), BAD_MESSAGES)
def test_bad_messages_are_named(messages: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make().render_chat(messages)


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a "}], "name": None}]
    before = copy.deepcopy(messages)
    make().render_chat(messages)
    make().render_chat(messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == before


def test_str_subclasses_are_plain_text() -> None:
    class Role(str, Enum):  # StrEnum needs Python 3.11
        USER = "user"

    text = make().render_chat(({"role": Role.USER, "content": "x"},))
    assert text.startswith("<|im_start|>user\nx")


PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("he", "llo")]}]
READS_PARTS = [
    "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.content %}({{ p.get('text') }}){% endfor %}{% endfor %}",
]


def test_parts_are_joined_for_a_template_of_strings() -> None:
    assert make().render_chat(PARTS) == make().render_chat(USER)
    # A template that asks "is it a string?" and prints nothing otherwise would lose the message.
    asks = "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}"
    assert make(asks).render_chat(PARTS) == "hello"


@pytest.mark.parametrize("template", READS_PARTS)
def test_parts_go_as_they_are_to_a_template_of_parts(template: str) -> None:
    assert make(template).render_chat(PARTS) == "(he)(llo)"


CONTINUED = [*USER, {"role": "assistant", "content": "The answer is "}]


def test_continue_final_message() -> None:
    text = make().render_chat(CONTINUED, continue_final_message=True, add_generation_prompt=False)
    assert text == make().render_chat(USER) + "The answer is "


@pytest.mark.parametrize("content", ["The answer is ", "x", "", " a\n", "<think>a</think> b"])
@pytest.mark.parametrize("template", [CHATML, RICH], ids=["chatml", "rich"])
def test_continue_equals_transformers(tmp_path: Path, content: str, template: str) -> None:
    path = save_dir(tmp_path, byte_level(), chat_template=template)
    for role in ("assistant", "user"):  # RICH trims what users say, not what the assistant says
        messages = [*USER, {"role": role, "content": content}]
        want = hf_render(path, messages, continue_final_message=True)
        text = Tokenizer.from_dir(path).render_chat(
            messages, continue_final_message=True, add_generation_prompt=False
        )
        assert text == want


@pytest.mark.parametrize("template", [CHATML, READS_PARTS[0]])
def test_continue_a_message_of_parts(template: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = make(template).render_chat(PARTS, **options)
    assert text.endswith("hello" if template == CHATML else "(he)(llo")


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        make().render_chat(CONTINUED, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }}", "{{ messages[-1].content.split('is')[-1] }}"],
    ids=["drops", "cuts"],
)
def test_continue_what_the_template_does_not_print(template: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(ValueError, match="does not print the last message"):
        make(template).render_chat(CONTINUED, **options)


def test_continue_a_message_without_text() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(ValueError, match=r"messages\[1\] has no text to continue"):
        make(RICH).render_chat([*USER, call], **options)


def test_compiled_templates_are_kept_but_bounded() -> None:
    tok = make()
    assert tok._template(CHATML) is tok._template(CHATML)
    for i in range(50):
        assert tok.render_chat(USER, chat_template=f"{i}{{{{ 1 }}}}") == f"{i}1"
    assert len(tok._compiled) <= 8
