"""The events of a parser: content, tool calls, and pieces of their arguments."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CallArguments", "CallEnd", "CallStart", "Content", "Event", "Output", "call_id", "short_call_id"]


@dataclass(slots=True)
class Content:
    """Text that is not part of a call."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A call begins.

    Attributes:
        index: counts the calls of an answer from 0.
    """

    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """The arguments of a call are complete, or the text ended in them."""

    index: int


Event = Content | CallStart | CallArguments | CallEnd


def call_id() -> str:
    """A new id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A new id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Output:
    """Collects events.  Adjacent events of one kind are merged, and whitespace next to a call is omitted.

    Whitespace is held until it is known what follows.  It is content before other content and at the end of an
    answer that made no call right before it.
    """

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self.calls = 0
        self._new_id = new_id
        self._events: list[Event] = []
        self._pieces: list[str] = []  # of the last event, if it has text
        self._space: list[str] = []
        self._behind_call = False

    def content(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            held, self._space = self._space, []
            self._add(Content, "".join(held) + shown)
            self._behind_call = False
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def start(self, name: str) -> None:
        self._space = []
        self._seal()
        self._events.append(CallStart(self.calls, self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add arguments of the last call."""
        if text:
            self._add(CallArguments, text)

    def end(self) -> None:
        self._seal()
        self._events.append(CallEnd(self.calls - 1))
        self._behind_call = True

    def finish(self) -> None:
        """The answer ended."""
        if self._space and not self._behind_call:
            self._add(Content, "".join(self._space))
        self._space = []

    def take(self) -> list[Event]:
        """The events since the last call of this method."""
        self._seal()
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[Content] | type[CallArguments], text: str) -> None:
        if not self._pieces or not isinstance(self._events[-1], kind):
            self._seal()
            self._events.append(Content("") if kind is Content else CallArguments(self.calls - 1, ""))
        self._pieces.append(text)

    def _seal(self) -> None:
        if self._pieces:
            last = self._events[-1]
            assert isinstance(last, (Content, CallArguments))
            last.text = "".join(self._pieces)
            self._pieces = []
