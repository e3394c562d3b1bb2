"""Finds the checkpoint's chat template, and has it rendered.  No torch, no Triton."""

from __future__ import annotations

import json
from typing import Any

from inflight.frontend.chat.chat_messages import ChatTemplateError, has_template
from inflight.frontend.chat.render_client import RenderClient
from inflight.frontend.text.tokenizer import TokenizerError, read_text
from inflight.hub import checkpoint_file

__all__ = ["ChatTemplate", "ChatTemplateError"]

_SECONDS = 2.0
_WITH_TOOLS = "tool_use"  # the name of a template for chats with tools, in addition to the default one


class ChatTemplate:
    """A checkpoint's chat template, rendered by a process of its own.

    Args:
        text: Jinja source; None if the checkpoint has no template.
        special_tokens: names such as `bos_token` that templates can use.
        problem: why there is no template.
        required: an unusable template is an error at `check`; else only requests with messages fail.
        seconds: CPU time that rendering can take.
        text_with_tools: Jinja source for chats with tools; None: `text` renders them, too.
        trusts_requests: chats can bring templates of their own, which another process renders, within the same limits.

    Attributes:
        text: source of the template for chats with tools; None without one.
    """

    def __init__(
        self,
        text: str | None,
        special_tokens: dict[str, str] | None = None,
        problem: str = "the checkpoint has none",
        required: bool = True,
        seconds: float = _SECONDS,
        text_with_tools: str | None = None,
        trusts_requests: bool = False,
    ) -> None:
        self._for_requests = RenderClient(None, special_tokens or {}, seconds) if trusts_requests else None
        self._problem = problem
        self._required = required
        self.text = text_with_tools or text
        self._process = (
            None if text is None else RenderClient(text, special_tokens or {}, seconds, text_with_tools=text_with_tools)
        )
        if self._process is not None:
            self._process.start()

    @classmethod
    def load(
        cls,
        source: str,
        *,
        revision: str | None = None,
        override: str | None = None,
        seconds: float = _SECONDS,
        trusts_requests: bool = False,
    ) -> ChatTemplate:
        """Read `chat_template.jinja`, or the template in `tokenizer_config.json`; `check` it later.

        Args:
            override: template text to use instead.
            seconds, trusts_requests: as in the constructor.

        Raises:
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
        text, with_tools = override, None
        if text is None:
            text, with_tools = _found(source, settings.get("chat_template"), revision)
        if text is not None and not isinstance(text, str):
            problem = f"its chat_template is {type(text).__name__}, not a string"
            return cls(None, tokens, problem=problem, seconds=seconds, trusts_requests=trusts_requests)
        with_tools = with_tools if isinstance(with_tools, str) else None
        return cls(
            text,
            tokens,
            required=override is not None,
            seconds=seconds,
            text_with_tools=with_tools,
            trusts_requests=trusts_requests,
        )

    def check(self) -> None:
        """Wait until the template is compiled.

        Raises:
            ChatTemplateError: it is required and cannot be used.
        """
        if self._process is None:
            return
        try:
            self._process.check()
        except ChatTemplateError as error:
            if self._required:
                raise
            self._problem = str(error)  # plain prompts work without it
            self.text = None
            self._process.close()
            self._process = None

    def render(self, chat: str) -> str:
        """Prompt text up to where the assistant's answer begins or continues; special tokens are spelt out.

        Args:
            chat: JSON list of messages, or an object with them and options (`read_chat`).

        Raises:
            ChatTemplateError: no template, not such a JSON, or the template rejects it or takes too long.
        """
        if self._for_requests is not None and has_template(chat) and _brings_template(chat):
            return self._for_requests.render(chat)
        if self._process is None:
            raise ChatTemplateError(
                f"no chat template ({self._problem}): send text_input, or set chat_template in model.json"
            )
        return self._process.render(chat)

    def close(self) -> None:
        """End the processes; safe to repeat."""
        processes = self._process, self._for_requests
        self._process = self._for_requests = None
        for process in processes:
            if process is not None:
                process.close()


def _brings_template(chat: str) -> bool:
    try:
        read = json.loads(chat)
    except (ValueError, RecursionError):
        return False  # the other process says what is wrong
    return isinstance(read, dict) and read.get("chat_template") is not None


def _found(source: str, setting: Any, revision: str | None) -> tuple[Any, Any]:
    """The template, and the one for chats with tools (None: the same one), from files or the tokenizer's `setting`."""
    path = checkpoint_file(source, "chat_template.jinja", revision)
    if path is not None:
        tools_path = checkpoint_file(source, f"additional_chat_templates/{_WITH_TOOLS}.jinja", revision)
        return read_text(path), None if tools_path is None else read_text(tools_path)
    if not isinstance(setting, list):
        return setting, None
    entries = [entry for entry in setting if isinstance(entry, dict)]
    named = {entry.get("name"): entry.get("template") for entry in entries}
    return named.get("default", next(iter(named.values()), None)), named.get(_WITH_TOOLS)


def _read_json(source: str, name: str, revision: str | None) -> dict[str, Any]:
    path = checkpoint_file(source, name, revision)
    if path is None:
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}
