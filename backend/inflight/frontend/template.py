"""Chat messages -> prompt text, in the process that may take as long as it is allowed to.

Renders like transformers' `apply_chat_template`: the same sandbox, options, filters and globals
(https://huggingface.co/docs/transformers/chat_templating).  A template is a program that came with the checkpoint:
it may loop, or build a string of any size.  Nothing here bounds that; `template_process` does.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplateError", "Template"]

_ROLES_NOTE = 'a list of objects such as {"role": "user", "content": "..."}'


class ChatTemplateError(ValueError):
    """Messages that cannot be rendered, or a template that cannot be used; the message says why."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's API

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class Template:
    """A compiled chat template.

    Args:
        text: Jinja source.
        special_tokens: names such as `bos_token` that templates may use.

    Raises:
        ChatTemplateError: `text` is not valid Jinja.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template is nested too deeply") from None

    def render(self, messages: bytes) -> bytes:
        """UTF-8 text that ends where the assistant's answer begins; special tokens are spelt out.

        Args:
            messages: JSON.

        Raises:
            ChatTemplateError: not a list of messages, or the template rejects them.
        """
        try:
            found = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"not valid JSON: {error}") from None
        _check_messages(found)
        try:
            text = self._template.render(messages=found, add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # whatever a template can raise
            if isinstance(error, MemoryError):
                raise
            raise ChatTemplateError(f"the chat template rejected the messages: {error}") from None
        try:
            return text.encode("utf-8")  # JSON can contain unpaired surrogates, which UTF-8 cannot
        except UnicodeEncodeError as error:
            raise ChatTemplateError(f"not valid JSON: {error}") from None


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ChatTemplateError(f"got {_kind(value)}: give {_ROLES_NOTE}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"message {number} is not an object with a role: give {_ROLES_NOTE}")


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"
