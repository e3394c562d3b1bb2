"""Checks the messages of a chat, and converts them for chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from inflight_gateway.errors import APIError, invalid

__all__ = ["template_messages", "text_of", "unusual_roles"]

_ROLE = re.compile(r"[\w .:-]{1,64}")  # a template can know more than these
_MAX_SHOWN = 100  # characters of a value
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning")


def template_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages for a chat template: contents are strings, and the arguments of calls are objects.

    The role developer becomes system, as templates do not know it; roles that are not OpenAI's stay.  Keys without a
    meaning for a template are omitted, so that a client can send whole answers back.

    Raises:
        APIError: a message that is not of OpenAI's form, or has parts other than text; it says which.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid('messages: a list of objects such as {"role": "user", "content": "Hi"} is expected', "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def unusual_roles(messages: list[dict[str, Any]]) -> list[str]:
    """The roles that are not OpenAI's, which templates can leave out."""
    return sorted({message["role"] for message in messages}.difference(_ROLES))


def text_of(content: Any, where: str) -> str:
    """The text of a content: a string, or parts of text, joined by newlines.

    Raises:
        APIError: anything else; it says where.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of parts is expected")
    texts = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise _wrong(place, f"parts of type {kind!r} are not supported; send text", "unsupported_content_part")
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise _wrong(place, 'a part such as {"type": "text", "text": "Hi"} is expected')
        texts.append(text)
    return "\n".join(texts)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, "an object with role and content is expected")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        shown = repr(role)[:_MAX_SHOWN]
        raise _wrong(f"{where}.role", f"{shown} came; a role such as {', '.join(_ROLES)} is expected")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content, calls = message.get("content"), message.get("tool_calls")
    if role == "assistant":
        if message.get("audio") is not None:
            raise _wrong(f"{where}.audio", "not supported; leave it out", "unsupported_parameter")
        if content is None and message.get("refusal") is not None:
            content = message["refusal"]
        if calls:
            found["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    elif calls:
        raise _wrong(f"{where}.tool_calls", "only messages of the assistant have calls")
    if content is not None:
        found["content"] = text_of(content, f"{where}.content")
    elif role != "assistant":
        raise _wrong(f"{where}.content", "a string or a list of parts is expected")
    else:
        found["content"] = ""
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise _wrong(f"{where}.tool_call_id", "the id of the call that this answers is expected")
    for key in _KEPT:
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise _wrong(f"{where}.{key}", "a string is expected")
            found[key] = value
    return found


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "a list of calls is expected")
    found = []
    for number, call in enumerate(calls):
        place = f"{where}[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise _wrong(place, 'a call such as {"id": "1", "type": "function", "function": {...}} is expected')
        if call.get("type", "function") != "function":
            raise _wrong(f"{place}.type", f"{call['type']!r} is not supported; send function", "unsupported_tool_type")
        arguments = _arguments(function.get("arguments"))
        found.append({"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def _arguments(text: Any) -> Any:
    """The object in a JSON text; any other text of a model is returned unchanged."""
    if text is None or (isinstance(text, str) and not text.strip()):
        return {}
    if isinstance(text, str):
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return text
        return value if isinstance(value, dict) else text
    return text


def _wrong(where: str, message: str, code: str | None = None) -> APIError:
    return invalid(f"{where}: {message}", where.partition("[")[0].partition(".")[0], code)
