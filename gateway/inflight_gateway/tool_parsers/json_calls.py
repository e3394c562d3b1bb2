"""Calls in the form of JSON objects: `{"name": "f", "arguments": {...}}`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from inflight_gateway.tool_parsers.base import MAX_NAME
from inflight_gateway.tool_parsers.events import Output
from inflight_gateway.tool_parsers.scanner import Piece, Scanner, Wait, decoded_string

__all__ = ["Outcome", "read_arguments", "read_call"]

_ARGUMENTS = ("arguments", "parameters")


class Outcome(Enum):
    """The result of reading a call."""

    CALL = "a whole call"
    BROKEN = "the text ended in a call, or what follows is not JSON"
    NONE = "no call; nothing was sent"


def read_call(
    scan: Scanner, out: Output, accepts: Callable[[str], bool], needs_arguments: bool = False
) -> Wait[Outcome]:
    """Read the object that begins with the next character.  A call that has begun is left open.

    It is a call as soon as there are a name and the beginning of its arguments, in any order.

    Args:
        accepts: whether a tool can have that name.
        needs_arguments: an object without arguments is no call; else it is a call without arguments.
    """
    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    begun = False
    scan.at += 1
    while (following := (yield from scan.skip_space())) != "}":
        key = yield from scan.short_string(MAX_NAME)
        if following != '"' or key is None or (yield from scan.skip_space()) != ":":
            break
        scan.at += 1
        if key == "name" and name is None:
            name = yield from scan.short_string(MAX_NAME)
            if not name or not accepts(name):
                break
            if early is not None:
                begun = _begin(scan, out, name, "".join(early))
        elif key in _ARGUMENTS and not begun and early is None:
            if not (yield from scan.skip_space()):
                break
            if name is not None:
                begun = _begin(scan, out, name, "")
            else:
                early = []
            if not (yield from read_arguments(scan, out.arguments if early is None else early.append)):
                break
        elif not (yield from scan.json_value(_nothing)):
            break
        following = yield from scan.skip_space()
        if following == ",":
            scan.at += 1
        elif following != "}":
            break
    else:
        scan.at += 1
        if not begun and name is not None and not needs_arguments:
            begun = _begin(scan, out, name, "{}")
        return Outcome.CALL if begun else Outcome.NONE
    return Outcome.BROKEN if begun else Outcome.NONE


def read_arguments(scan: Scanner, piece: Piece) -> Wait[bool]:
    """Read a JSON value as arguments; whether it is whole.

    An object is passed on as it comes.  Models also write JSON text as a string, which is decoded, and null for {}.
    """
    if (yield from scan.skip_space()) in ("{", "["):
        return (yield from scan.json_value(piece))
    pieces: list[str] = []
    whole = yield from scan.json_value(pieces.append)
    text = "".join(pieces)
    if text == "null":
        text = "{}"
    elif whole and text.startswith('"'):
        decoded = decoded_string(text)
        text = text if decoded is None else decoded
    piece(text)
    return whole


def _begin(scan: Scanner, out: Output, name: str, arguments: str) -> bool:
    scan.drop()
    out.start(name)
    out.arguments(arguments)
    return True


def _nothing(text: str) -> None:
    """Discards the text that is read."""
