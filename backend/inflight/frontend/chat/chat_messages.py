"""Reads the input `messages`: a list of messages, or an object with the list and options for the template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Chat", "ChatTemplateError", "has_template", "read_chat"]

_ROLES_NOTE = 'a list of objects such as {"role": "user", "content": "..."}'
_KEYS = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template"),
)
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|6[1358cCdD]|7[04])")  # one of the key, which no serializer escapes
_MAX_TEMPLATE = 2**16  # characters; the longest of known checkpoints has a quarter of that
# Names that chat_template_kwargs must not set: the keys themselves, and arguments that select the template.
_RESERVED = {*_KEYS, "conversation", "chat_template", "tokenize"}


class ChatTemplateError(ValueError):
    """Messages that cannot be rendered, or a template that cannot be used; the message says why."""


@dataclass(frozen=True)
class Chat:
    """A chat for a template to render.

    Attributes:
        messages: at least one, each with a role.
        tools: as in OpenAI's API; None if there are none.
        add_generation_prompt: end where the assistant's answer begins.
        continued: field of the last message that the answer continues; None: the answer is a new message.
        variables: further variables of the template.
        template: Jinja source that replaces the model's own template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continued: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    template: str | None = None


def read_chat(text: bytes) -> Chat:
    """Check the JSON of a chat.

    Raises:
        ChatTemplateError: it has neither form; the message quotes the value and says what is allowed.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"not valid JSON: {error}") from None
    given = {"messages": found} if not isinstance(found, dict) else {k: v for k, v in found.items() if v is not None}
    for name in given:
        if name not in _KEYS:
            raise ChatTemplateError(f"the object has the key {name[:100]!r}: allowed are {', '.join(_KEYS)}")
    if "messages" not in given:
        raise ChatTemplateError('the object has no "messages": give {"messages": [...]} with its options, or the list')
    _check_messages(given["messages"])
    continued = _continued(given.get("continue_final_message", False))
    prompts = given.get("add_generation_prompt", continued is None)
    if not isinstance(prompts, bool):
        raise ChatTemplateError(f"add_generation_prompt is {_kind(prompts)}: must be true or false")
    if prompts and continued is not None:
        raise ChatTemplateError(
            "add_generation_prompt and continue_final_message exclude each other: the answer begins a new message, or "
            "goes on with the last one"
        )
    return Chat(given["messages"], _tools(given), prompts, continued, _variables(given), _template(given))


def has_template(text: bytes | str) -> bool:
    """Whether the JSON of a chat can have a template of its own.  Cheap; a message can say the same."""
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return b'"chat_template"' in raw or _ESCAPED_LETTER.search(raw.replace(b"\\\\", b"")) is not None


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ChatTemplateError(f"got {_kind(value)}: give {_ROLES_NOTE}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"message {number} is not an object with a role: give {_ROLES_NOTE}")


def _continued(value: Any) -> str | None:
    if not isinstance(value, (bool, str)) or value == "":
        raise ChatTemplateError(
            f"continue_final_message is {_kind(value)}: must be true, false, or the field of the message to go on with"
        )
    return value if isinstance(value, str) else "content" if value else None


def _tools(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = given.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ChatTemplateError(
            'tools is not a list of objects: give [{"type": "function", "function": {"name": "...", ...}}]'
        )
    return tools


def _template(given: Mapping[str, Any]) -> str | None:
    template = given.get("chat_template")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ChatTemplateError(f"chat_template is {_kind(template)}: must be a string with Jinja source")
    if len(template) > _MAX_TEMPLATE:
        raise ChatTemplateError(f"chat_template has {len(template)} characters: at most {_MAX_TEMPLATE} are allowed")
    return template


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ChatTemplateError(f"chat_template_kwargs is {_kind(variables)}: must be an object")
    for name in sorted(_RESERVED & variables.keys()):
        where = "send it beside chat_template_kwargs" if name in _KEYS else "the template is the model's"
        raise ChatTemplateError(f"chat_template_kwargs may not set {name!r}: {where}")
    return variables


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"
