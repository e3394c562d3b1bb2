"""Splits an answer into the model's reasoning, between tags such as `<think>` and `</think>`, and the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from inflight_gateway.errors import APIError
from inflight_gateway.tool_parsers.scanner import Marks, Scanner, Wait

if TYPE_CHECKING:
    from inflight_gateway.upstream import ServedModel, Upstream

__all__ = ["FORMATS", "ReasoningParser", "check_reasoning_parser", "reasoning_opened", "reasoning_tags"]

# By vLLM's names for `--reasoning-parser`.
FORMATS: dict[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "qwen3": ("<think>", "</think>"),
}
_MAX_KEY, _MAX_KNOWN, _TAIL_TOKENS = 1024, 256, 64
# By upstream, model and template options: whether the prompt opens the reasoning.
_opened: WeakKeyDictionary[Upstream, dict[str, bool]] = WeakKeyDictionary()


def check_reasoning_parser(parser: str) -> None:
    """Check the operator's choice: a name in `FORMATS`, "none", or "" to detect it from the chat template.

    Raises:
        ValueError: it is none of these.
    """
    if parser and parser != "none" and parser not in FORMATS:
        raise ValueError(f"reasoning_parser {parser!r}: must be none, or one of {', '.join(FORMATS)}")


def reasoning_tags(parser: str, info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The tags of a model's reasoning; None for a model without reasoning.

    Args:
        parser: the operator's choice: see `check_reasoning_parser`.
        info: facts about the model, with `reasoning_tags`.
    """
    if parser:
        return None if parser == "none" else FORMATS[parser]
    tags = info.get("reasoning_tags")
    if isinstance(tags, Sequence) and len(tags) == 2 and all(isinstance(tag, str) and tag for tag in tags):
        return tags[0], tags[1]
    return None


async def reasoning_opened(
    upstream: Upstream, model: ServedModel, tag: str, template_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the prompt ends with `tag`, so that an answer begins with reasoning.

    With `chat_template_kwargs`, which can turn thinking on or off, the model is asked to render a chat, once for each
    choice.
    """
    usual = bool(model.info.get("reasoning_opened"))
    plain = (bool, int, str)
    chosen = {name: value for name, value in template_kwargs.items() if isinstance(value, plain) and value != ""}
    if not chosen or not model.info or len(key := json.dumps([model.name, chosen], sort_keys=True)) > _MAX_KEY:
        return usual
    known = _opened.setdefault(upstream, {})
    if key not in known:
        chat = [{"role": "user", "content": "Hi"}]
        try:
            answer = await upstream.tokenize(model, messages=chat, chat_template_kwargs=chosen)
            tail = await upstream.detokenize(model, answer["tokens"][-_TAIL_TOKENS:])
        except APIError:
            return usual  # the request itself will fail with a message
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[key] = tail.rstrip().endswith(tag)
    return known[key]


class ReasoningParser:
    """Parses one answer in pieces.  Whitespace next to the tags is omitted.

    Only the beginning of an answer is reasoning: tags further on are text.  Reasoning that is never closed is the
    whole answer.

    Args:
        tags: before and after the reasoning.
        opened: whether the prompt contained the first one.
    """

    def __init__(self, tags: tuple[str, str], opened: bool) -> None:
        self._begin, self._end = tags[0], Marks(tags[1])
        self._opened = opened
        self._scan = Scanner()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._space: list[str] = []
        self._run = self._parse()

    def feed(self, text: str) -> tuple[str, str]:
        """Add text of the answer; returns the new reasoning and the new rest."""
        self._scan.add(text)
        next(self._run)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """As `feed`, at the end of the answer."""
        self._scan.ended = True
        next(self._run, None)
        return self._take()

    def _parse(self) -> Wait[None]:
        scan = self._scan
        scan.keep()
        yield from scan.skip_space()
        if (yield from scan.accept(self._begin)) or self._opened:
            scan.drop()
            yield from scan.skip_space()
            yield from scan.until(self._end, self._thought)
            yield from scan.skip_space()
        else:
            self._content.append(scan.kept())
        yield from scan.rest(self._content.append)

    def _thought(self, text: str) -> None:
        """Hold trailing whitespace back until more text follows: at the end it is dropped."""
        shown = text.rstrip()
        if shown:
            self._reasoning += [*self._space, shown]
            self._space = []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _take(self) -> tuple[str, str]:
        found = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return found
