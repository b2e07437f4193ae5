"""What may stand in a conversation: the checks on messages and tools that users pass in.

Owns the copy of user data to plain JSON types and the errors that name a bad message by its index.
Never renders anything; `chat_template.py` does, on what this module returns. Serves chapter 00.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a deep copy of `messages` as plain data; an error names the index of a bad one.

    Keys whose value is None are dropped: clients send `content=None` beside tool calls, and
    templates that test for the key would print the word "None".
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty: a conversation needs at least one message")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        got = type(message).__name__
        raise TypeError(f"{where} must be a dict with 'role' and 'content', got {got}")
    kept = {k: v for k, v in plain_data(message, where).items() if v is not None}
    if "role" not in kept:
        raise ValueError(f"{where} has no 'role' (its keys: {sorted(message, key=str)})")
    if not isinstance(kept["role"], str):
        raise TypeError(f"{where}['role'] must be a str, got {kept['role']!r}")
    content = kept.get("content")
    if content is None:
        if not kept.get("tool_calls"):  # a turn that only calls tools says nothing
            raise ValueError(f"{where} has no 'content' (its keys: {sorted(message, key=str)})")
    elif isinstance(content, (list, tuple)):
        for i, part in enumerate(content):
            _check_part(part, f"{where}['content'][{i}]")
    elif not isinstance(content, str):
        got = type(message["content"]).__name__
        raise TypeError(f"{where}['content'] must be a str or a list of text parts, got {got}")
    return kept


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict):
        raise TypeError(f"{where} must be a dict {{'type': 'text', 'text': ...}}, got {part!r:.80}")
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{where} is no text part (type {part.get('type')!r}); only text is supported"
        )


def check_tools(tools: object) -> list[Any] | None:
    """Return a copy of a list of JSON schemas (None stays None); TypeError names a bad one."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise TypeError(f"tools must be a list of JSON schemas, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools[{i}] must be a JSON schema (dict), got {type(tool).__name__}")
    return plain_data(list(tools), "tools")


def plain_data(value: object, where: str) -> Any:
    """Copy `value` to exact JSON types; TypeError says where it holds something else.

    A template is foreign code, and objects carry methods that it could call.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            # The base type's own conversion, as `str(Role.USER)` of an enum is "Role.USER".
            return value if type(value) is kind else getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain_data(k, where): plain_data(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{where} must be JSON data, got {type(value).__name__}")


def join_parts(message: dict[str, Any]) -> None:
    """Turn content given as text parts into one string, in place."""
    if isinstance(message.get("content"), list):
        message["content"] = "".join(part["text"] for part in message["content"])
