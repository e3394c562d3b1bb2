"""The Protocol of a tool parser, and the common base of the parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from inflight_gateway.tool_parsers.events import Content, Event, Output, call_id
from inflight_gateway.tool_parsers.scanner import Scanner, Wait

__all__ = ["MAX_NAME", "TextParser", "ToolParser"]

MAX_NAME = 256  # characters of a tool's name


class ToolParser(Protocol):
    """Finds the tool calls in one answer.

    The joined events of a text do not depend on how it was cut: content is a string, each call a name and a string of
    arguments.  Text that turns out to be no call is content, to the letter.  Nothing is ever taken back: once a call
    has begun, what follows belongs to it until it ends, as JSON that is not valid if the model wrote none.
    """

    def feed(self, text: str) -> list[Event]:
        """More text of the answer."""

    def finish(self, cut: bool = False) -> list[Event]:
        """The answer ended.

        Args:
            cut: by its length limit, so that what can only be the beginning of a call is no content.
        """


class TextParser:
    """A parser as a generator that reads from a scanner: subclasses define `_parse`.

    Args:
        tools: JSON Schemas of the arguments, by name of the tool.

    Attributes:
        MARKS: beginnings of calls in this format, for which a model can have special tokens.
        ENDS: texts that can follow a call.
    """

    MARKS: ClassVar[tuple[str, ...]] = ()
    ENDS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Any], new_id: Callable[[], str] = call_id) -> None:
        self._tools = tools
        self._scan = Scanner()
        self._out = Output(new_id)
        self._run = self._parse()

    def feed(self, text: str) -> list[Event]:
        self._scan.add(text)
        next(self._run)  # never ends before the text does
        return self._out.take()

    def finish(self, cut: bool = False) -> list[Event]:
        self._scan.ended = True
        next(self._run, None)
        self._out.finish()
        events = self._out.take()
        return [one for one in events if not self._is_of_call(one)] if cut else events

    def _is_of_call(self, event: Event) -> bool:
        """Whether text that was held back until the end belongs to a call."""
        text = event.text.strip() if isinstance(event, Content) else ""
        marks = (*self.MARKS, *self.ENDS)
        return bool(text) and (text.startswith(marks) or any(mark.startswith(text) for mark in marks))

    def _parse(self) -> Wait[None]:
        raise NotImplementedError
