"""Server-sent events, as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["DONE", "KEEP_ALIVE", "SSE", "EventTemplate", "Framing", "encode_json", "event", "named_event"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True)
class Framing:
    """The form of a stream.

    Attributes:
        media_type: of the response.
        keep_alive: sent when nothing else was for a while.
    """

    media_type: str
    keep_alive: bytes


SSE = Framing("text/event-stream", KEEP_ALIVE)

encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode

_HOLE = "\ue000hole\ue000"  # private use: no value of a prepared event contains it


def event(value: Any) -> bytes:
    """One event: `data: <JSON>`."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event with a name, as `/v1/responses` sends them."""
    return b"event: " + name.encode() + b"\ndata: " + encode_json(value) + b"\n\n"


class EventTemplate:
    """An event with one string that differs from chunk to chunk; the rest is encoded once.

    Args:
        make: returns the event's value, which contains the given string once.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        before, hole, after = event(make(_HOLE)).partition(encode_json(_HOLE))
        assert hole and encode_json(_HOLE) not in after
        self._before = before
        self._after = after

    def fill(self, text: str) -> bytes:
        """The event with `text` in its place."""
        return b"%b%b%b" % (self._before, encode_json(text), self._after)
