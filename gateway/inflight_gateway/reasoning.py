"""Splits an answer into the model's reasoning, between tags such as `<think>` and `</think>`, and the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from inflight_gateway.errors import APIError
from inflight_gateway.tool_parsers.scanner import Marks, Scanner, Wait

if TYPE_CHECKING:
    from inflight_gateway.upstream import AnyUpstream, ServedModel

__all__ = ["ReasoningParser", "reasoning_opened"]

_MAX_KEY, _MAX_KNOWN, _TAIL_TOKENS = 1024, 256, 64
# By upstream, model and template options: whether the prompt opens the reasoning.
_opened: WeakKeyDictionary[AnyUpstream, dict[str, bool]] = WeakKeyDictionary()


async def reasoning_opened(
    upstream: AnyUpstream,
    model: ServedModel,
    tag: str,
    template_kwargs: Mapping[str, Any],
    template: Mapping[str, str] | None = None,
) -> bool:
    """Whether the prompt ends with `tag`, so that an answer begins with reasoning.

    With `chat_template_kwargs`, which can turn thinking on or off, the model is asked to render a chat, once for each
    choice.

    Args:
        template: `chat_template` of the request, if it has one.
    """
    usual = bool(model.info.get("reasoning_opened"))
    plain = (bool, int, str)
    chosen = {name: value for name, value in template_kwargs.items() if isinstance(value, plain) and value != ""}
    own = dict(template or {})
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest() if own else ""
    key = json.dumps([model.name, digest, chosen], sort_keys=True)
    if not (chosen or own) or not model.info or len(key) > _MAX_KEY:
        return usual
    known = _opened.setdefault(upstream, {})
    if key not in known:
        chat = [{"role": "user", "content": "Hi"}]
        try:
            answer = await upstream.tokenize(model, messages=chat, chat_template_kwargs=chosen, **own)
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
