"""Chat messages -> prompt text, in a process with limits of its own.

Renders like transformers' `apply_chat_template`: the same sandbox, options, filters and globals
(https://huggingface.co/docs/transformers/chat_templating).  A template is a program that came with the checkpoint:
it can loop, or build a string of any size.  Nothing here limits that; `render_worker.py` does.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight.frontend.chat.chat_messages import Chat, ChatTemplateError, read_chat

__all__ = ["ChatTemplateError", "TemplateRenderer"]

# Keys of a message that contain a model's reasoning.  Templates read the first; gpt-oss's read the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it renders its body."""

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


class TemplateRenderer:
    """A compiled chat template.

    Args:
        text: Jinja source; None: each chat brings a template of its own, which others must not.
        special_tokens: names such as `bos_token` that templates can use.
        text_with_tools: Jinja source for chats with tools; None: `text` renders them.

    Raises:
        ChatTemplateError: a text is not valid Jinja.
    """

    def __init__(self, text: str | None, special_tokens: Mapping[str, str], text_with_tools: str | None = None) -> None:
        self._special_tokens = special_tokens
        self._template = None if text is None else _compiled(text)
        self._template_with_tools = self._template if text_with_tools is None else _compiled(text_with_tools)

    def render(self, chat: bytes) -> bytes:
        """UTF-8 text up to where the assistant's answer begins or continues; special tokens are spelt out.

        Args:
            chat: JSON, see `read_chat`.

        Raises:
            ChatTemplateError: it is not a chat, or the template rejects it.
        """
        read = read_chat(chat)
        if self._template is not None and read.template is not None:
            raise ChatTemplateError(
                "chat_template: a template is a program, and this model renders none of requests; leave it out, or set "
                "trust_request_chat_template in model.json if you trust all callers"
            )
        messages = [_as_templates_read(message) for message in read.messages]
        mark = _Mark(messages[-1], read.continued) if read.continued is not None else None
        try:
            text = self._render(read, messages)
        except Exception as error:  # a template can raise anything
            if isinstance(error, (ChatTemplateError, MemoryError)):
                raise
            raise ChatTemplateError(f"the chat template rejected the messages: {error}") from None
        if mark is not None:
            text = mark.cut(text)
        try:
            return text.encode("utf-8")  # JSON can contain unpaired surrogates, which UTF-8 cannot
        except UnicodeEncodeError as error:
            raise ChatTemplateError(f"not valid JSON: {error}") from None

    def _render(self, chat: Chat, messages: list[dict[str, Any]]) -> str:
        template = self._template if chat.tools is None else self._template_with_tools
        if template is None:
            assert chat.template is not None, "only chats with a template come here"
            template = _compiled(chat.template)
        return template.render(
            {
                "documents": None,
                **self._special_tokens,
                **chat.variables,
                "messages": messages,
                "tools": chat.tools,
                "add_generation_prompt": chat.add_generation_prompt,
            }
        )


def _compiled(text: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from None
    except RecursionError:
        raise ChatTemplateError("the chat template is nested too deeply") from None


def _as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """The message without null values, which many templates would print, and with the reasoning under every name."""
    read = {key: value for key, value in message.items() if value is not None}
    reasoning = next((read[name] for name in _REASONING if name in read), None)
    return read if reasoning is None else {"thinking": reasoning, **read, "reasoning_content": reasoning}


class _Mark:
    """Finds the end of a message in the prompt: a unique mark is appended to its text before rendering.

    Args:
        message: the message; it is changed.
        field: the field with the text to continue.

    Raises:
        ChatTemplateError: the field has no text.
    """

    def __init__(self, message: dict[str, Any], field: str) -> None:
        self._mark = f"<{secrets.token_hex(16)}>"
        value = message.get(field)
        self._text = self._mark_blocks(message, field, value) if isinstance(value, list) else value
        if not isinstance(self._text, str):
            raise ChatTemplateError(
                f"continue_final_message: the last message has no text in {field[:100]!r} to go on with"
            )
        if isinstance(value, str):
            for name in {field, *(name for name in _REASONING if field in _REASONING and message.get(name) == value)}:
                message[name] = self._marked(value)

    def _marked(self, text: str) -> str:
        return f"{text}{self._mark} "  # the space shows whether the template trims

    def _mark_blocks(self, message: dict[str, Any], field: str, blocks: list[Any]) -> str | None:
        """Append the mark to the last block with a text, and return that text."""
        for number in range(len(blocks) - 1, -1, -1):
            block = blocks[number]
            if isinstance(block, dict) and isinstance(block.get("text"), str):
                marked = {**block, "text": self._marked(block["text"])}
                message[field] = [*blocks[:number], marked, *blocks[number + 1 :]]
                return str(block["text"])
        return None

    def cut(self, prompt: str) -> str:
        """The prompt up to the end of the message.

        Raises:
            ChatTemplateError: the template leaves the message out, or changes it.
        """
        assert self._text is not None
        end = prompt.rfind(self._mark)
        if end < 0 or self._text.strip() not in prompt:
            raise ChatTemplateError(
                "continue_final_message: the chat template leaves out the last message, or changes its text: there is "
                "nothing to go on with"
            )
        keeps_spaces = prompt[end:].startswith(self._marked(""))
        return prompt[:end] if keeps_spaces else prompt[:end].rstrip()
