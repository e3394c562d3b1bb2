"""Chat messages -> prompt text, by the checkpoint's Jinja template.  No torch, no Triton.

Renders like transformers' `apply_chat_template`: the same sandbox, options, filters and globals
(https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight.frontend.text import TokenizerError, read_text
from inflight.hub import checkpoint_file

__all__ = ["ChatTemplate", "ChatTemplateError"]

_ROLES_NOTE = 'a list of objects such as {"role": "user", "content": "..."}'


class ChatTemplateError(ValueError):
    """Messages that cannot be rendered; the message says why."""


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


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        text: Jinja source; None if the checkpoint has no template.
        special_tokens: names such as `bos_token` that templates may use.
        problem: why there is no template.

    Raises:
        ChatTemplateError: `text` is not valid Jinja.
    """

    def __init__(
        self, text: str | None, special_tokens: dict[str, str] | None = None, problem: str = "the checkpoint has none"
    ) -> None:
        self._problem = problem
        self._special_tokens = special_tokens or {}
        try:
            self._template = None if text is None else _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template is nested too deeply") from None

    @classmethod
    def load(cls, source: str, *, revision: str | None = None, override: str | None = None) -> ChatTemplate:
        """Read `chat_template.jinja`, or the template in `tokenizer_config.json`.

        Args:
            override: template text to use instead.

        Raises:
            ChatTemplateError: `override` is not valid Jinja.
            TokenizerError: a file of the checkpoint is damaged.
        """
        settings = _read_json(source, "tokenizer_config.json", revision)
        special = {**_read_json(source, "special_tokens_map.json", revision), **settings}
        spelt = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in special.items()
            if name.endswith("_token")
        }
        tokens = {name: text for name, text in spelt.items() if isinstance(text, str)}
        text = override
        if text is None:
            path = checkpoint_file(source, "chat_template.jinja", revision)
            text = _of_several(settings.get("chat_template")) if path is None else read_text(path)
        try:
            if text is not None and not isinstance(text, str):
                raise ChatTemplateError(f"its chat_template is {type(text).__name__}, not a string")
            return cls(text, tokens)
        except ChatTemplateError as error:
            if override is not None:
                raise
            return cls(None, tokens, str(error))  # plain prompts work without it

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Prompt text that ends where the assistant's answer begins; special tokens are spelt out.

        Raises:
            ChatTemplateError: no template, or it rejects the messages.
        """
        if self._template is None:
            raise ChatTemplateError(
                f"no chat template ({self._problem}): send text_input, or set chat_template in model.json"
            )
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template rejected the messages: {error}") from None

    @staticmethod
    def check_messages(value: Any) -> list[dict[str, Any]]:
        """Return the value if it is a list of messages.

        Raises:
            ChatTemplateError: it is something else.
        """
        if not isinstance(value, list) or not value:
            raise ChatTemplateError(f"got {_kind(value)}: give {_ROLES_NOTE}")
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ChatTemplateError(f"message {number} is not an object with a role: give {_ROLES_NOTE}")
        return value


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"


def _of_several(template: Any) -> Any:
    """The template; of a list of named ones the default, or else the first."""
    if not isinstance(template, list):
        return template
    entries = [entry for entry in template if isinstance(entry, dict)]
    named = {entry.get("name"): entry.get("template") for entry in entries}
    return named.get("default", next(iter(named.values()), None))


def _read_json(source: str, name: str, revision: str | None) -> dict[str, Any]:
    path = checkpoint_file(source, name, revision)
    if path is None:
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}
