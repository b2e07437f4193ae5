"""Chat templates: messages in, one prompt string out.

Owns everything Jinja: finding a model's templates on disk, the sandbox they run in, and the trick
that leaves a final message open. A template is code written by whoever
published the checkpoint, so it runs sandboxed and sees plain JSON data only. Never tokenizes and
knows no vocabulary; `tokenizer.py` does that. Serves chapter 00 (text in, text out).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.chat_messages import check_messages, check_tools, join_parts, plain_data

# Marks the end of a message that is to be continued. Private-use characters survive `trim`,
# `tojson` and `split('</think>')`; a blank behind it tells whether the template trims.
_MARK = "\ue0f0\ue0f1"

# What a template can raise through no fault of ours: its own errors and those of operators.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Refusal(jinja2.TemplateError):
    """The template itself called raise_exception(text)."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here just its body."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, not bare statements: elsewhere the block is a call, so its `set`s do not leak.
        return nodes.Scope(body).set_lineno(lineno)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text. A syntax error is a ValueError that gives the line.
    """

    def __init__(self, source: str) -> None:
        env = _environment()
        try:
            self._template = env.from_string(source)
            self.accepts_parts = _reads_parts(env.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: list of dicts with `role` and `content` (text, or a list of text parts).
            tools: JSON schemas, handed to the template.
            add_generation_prompt: open an assistant turn at the end.
            continue_final_message: leave the last message open instead. Excludes the former.
            variables: further names the template sees (`bos_token`, `enable_thinking`, ...).

        Raises:
            TypeError, ValueError: with the index of a bad message, or the template's own text.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message=True needs add_generation_prompt=False: "
                "a prompt either leaves the last message open or begins a new one"
            )
        chat = check_messages(messages)
        if not self.accepts_parts:
            for message in chat:
                join_parts(message)
        if continue_final_message:
            final_text = _mark_final(chat)
        names = {"documents": None, **plain_data(dict(variables or {}), "variables")}
        names["tools"] = check_tools(tools)
        text = self._call(messages=chat, add_generation_prompt=add_generation_prompt, **names)
        return _cut_at_mark(text, final_text) if continue_final_message else text

    def _call(self, **names: Any) -> str:
        try:
            return self._template.render(**names)
        except _Refusal as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error
        except _TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from error


def load_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: source} of a model directory; the main template is called "default".

    Args:
        directory: may hold chat_template.jinja, additional_chat_templates/, chat_template.json.
        config: the parsed tokenizer_config.json, whose `chat_template` is a string or a list of
            {"name", "template"}.
    """
    found: dict[str, str] = {}
    main = directory / "chat_template.jinja"
    if main.is_file():
        found["default"] = main.read_text(encoding="utf-8")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    # A template file replaces the config's entry as a whole, as in transformers.
    if found:
        return found
    entry = config.get("chat_template")
    old = directory / "chat_template.json"
    if not entry and old.is_file():
        entry = json.loads(old.read_text(encoding="utf-8")).get("chat_template")
    return named_templates(entry)


def named_templates(entry: object) -> dict[str, str]:
    """Return {name: source} for any spelling of a `chat_template` entry; {} for None or ''."""
    if not entry:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, Mapping):
        return {str(name): str(source) for name, source in entry.items()}
    if isinstance(entry, list) and all(isinstance(item, Mapping) for item in entry):
        try:
            return {item["name"]: item["template"] for item in entry}
        except KeyError as error:
            raise ValueError(f"a named chat template lacks its {error} entry") from None
    raise ValueError(f"chat_template must be text or a list of named templates, got {entry!r:.80}")


def choose_template(templates: Mapping[str, str], chosen: str | None, has_tools: bool) -> str:
    """Return the source to use: `chosen` (a name or Jinja text), or "tool_use", or "default"."""
    if chosen is not None:
        if not isinstance(chosen, str):
            raise TypeError(f"chat_template must be a str, got {type(chosen).__name__}")
        # A misspelled name would otherwise be a "template" that prints itself as the whole prompt.
        if chosen not in templates and "{" not in chosen:
            raise ValueError(
                f"chat_template {chosen!r:.80} is neither Jinja text nor one of {sorted(templates)}"
            )
        return templates.get(chosen, chosen)
    if not templates:
        raise ValueError(
            "this tokenizer has no chat template: pass chat_template=..., or give a plain prompt"
        )
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ValueError(
            f"no default chat template: pass chat_template= one of {sorted(templates)}"
        )
    return templates[name]


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Append the mark to the last message's text, in place; return that text without it."""
    last = chat[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK + " "
        return content
    if not content:
        raise ValueError(
            f"continue_final_message: messages[{len(chat) - 1}] has no text to continue"
        )
    text = content[-1]["text"]
    content[-1]["text"] = text + _MARK + " "
    return text


def _cut_at_mark(rendered: str, final_text: str) -> str:
    """Return the prompt up to the end of the last message's own text."""
    at = rendered.rfind(_MARK)
    if at < 0 or final_text.strip() not in rendered:
        raise ValueError(
            "continue_final_message: the chat template does not print the last message as it is, "
            f"so its end cannot be found (message: {final_text!r:.80})"
        )
    # The blank behind the mark is gone: the template trims, and would have trimmed this text.
    trims = rendered[at + len(_MARK) : at + len(_MARK) + 1] != " "
    return rendered[:at].rstrip() if trims else rendered[:at]


def _reads_parts(tree: nodes.Template) -> bool:
    """Tell whether a template can print content given as parts, that is, reads some "text"."""
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)):
        if isinstance(node, nodes.Getattr) and node.attr == "text":
            return True
        keys = [node.arg] if isinstance(node, nodes.Getitem) else getattr(node, "args", [])
        if any(isinstance(key, nodes.Const) and key.value == "text" for key in keys):
            return True
    return False


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect templates are written in: Hugging Face's settings, functions and filters."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML: other tokens for every tool schema.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
