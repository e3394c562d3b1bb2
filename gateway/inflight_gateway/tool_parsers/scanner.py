"""Reads text that arrives in pieces.

A parser is a generator that yields whenever it needs more text, so its code looks like a parser of a whole text.  Each
character is read a bounded number of times, however the text is divided: the unread rest before the next piece is
never longer than a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

__all__ = ["Marks", "Piece", "Scanner", "Wait", "decoded_string"]

_T = TypeVar("_T")
Wait = Generator[None, None, _T]
Piece = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_BODY = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(r'[^\s,:{}\[\]"]*')
_CLOSING = {"{": "}", "[": "]"}


class Marks:
    """Texts to search for; none is the beginning of another."""

    def __init__(self, *marks: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, marks)))
        self._first = re.compile("|".join({re.escape(mark[0]) for mark in marks}))
        self._marks = marks
        self._longest = max(map(len, marks))

    def held(self, text: str, start: int) -> int:
        """The position, at `start` or later, where the end of `text` can begin a mark; its length if there is none."""
        for found in self._first.finditer(text, max(start, len(text) - self._longest + 1)):
            if any(mark.startswith(text[found.start() :]) for mark in self._marks):
                return found.start()
        return len(text)


class Scanner:
    """A position in a text that grows.

    Methods that return `Wait` are used with `yield from`.  Those with a `piece` pass on what they read, as it comes.

    Attributes:
        text, at: the text that is at hand, and how much of it is read.
        ended: whether no more will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept: list[str] | None = None
        self._kept_from = 0

    def add(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(self.text[self._kept_from : self.at])
            self._kept_from = 0
        self.text, self.at = self.text[self.at :] + text, 0

    def keep(self, *before: str) -> None:
        """Keep the text that is read from here on; `kept` returns it after `before`."""
        self._kept, self._kept_from = list(before), self.at

    def kept(self) -> str:
        """End `keep`, and return its `before` and the text that was read since."""
        pieces, self._kept = self._kept or [], None
        return "".join(pieces) + self.text[self._kept_from : self.at]

    def drop(self) -> None:
        """End `keep`, and discard the text."""
        self._kept = None

    def peek(self) -> Wait[str]:
        """The next character, not read; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Wait[str]:
        """Read JSON's whitespace, and `peek`."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            yield

    def accept(self, mark: str) -> Wait[bool]:
        """Read `mark` if it is next."""
        while True:
            if self.text.startswith(mark, self.at):
                self.at += len(mark)
                return True
            if self.ended or not mark.startswith(self.text[self.at : self.at + len(mark)]):
                return False
            yield

    def until(self, marks: Marks, piece: Piece) -> Wait[str]:
        """Read up to the first mark and over it; returns it, or "" at the end of the text."""
        while True:
            if found := marks.pattern.search(self.text, self.at):
                piece(self.text[self.at : found.start()])
                self.at = found.end()
                return found[0]
            end = len(self.text) if self.ended else marks.held(self.text, self.at)
            if end > self.at:
                piece(self.text[self.at : end])
                self.at = end
            if self.ended:
                return ""
            yield

    def run(self, pattern: re.Pattern[str], limit: int) -> Wait[str | None]:
        """Read the characters that `pattern` repeats; None if there are more than `limit`."""
        pieces: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            end = min(match.end() if match else self.at, self.at + limit + 1)
            pieces.append(self.text[self.at : end])
            limit -= end - self.at
            self.at = end
            if limit < 0:
                return None
            if self.at < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def rest(self, piece: Piece) -> Wait[None]:
        """Read all that comes."""
        while True:
            if self.at < len(self.text):
                piece(self.text[self.at :])
                self.at = len(self.text)
            if self.ended:
                return
            yield

    def json_value(self, piece: Piece) -> Wait[bool]:
        """Read a JSON value, checking only strings and brackets; returns whether it is complete.

        Stops before text that does not belong to it.
        """
        first = yield from self.skip_space()
        if first == '"':
            return (yield from self.json_string(piece))
        if first not in ("{", "["):
            return (yield from self._scalar(piece))
        closing: list[str] = []
        while True:
            found = _STRUCTURE.search(self.text, self.at)
            end = found.start() if found else len(self.text)
            if end > self.at:
                piece(self.text[self.at : end])
                self.at = end
            if found is None:
                if self.ended:
                    return False
                yield
            elif found[0] == '"':
                if not (yield from self.json_string(piece)):
                    return False
            else:
                if found[0] in _CLOSING:
                    closing.append(_CLOSING[found[0]])
                elif closing.pop() != found[0]:
                    return False
                piece(found[0])
                self.at += 1
                if not closing:
                    return True

    def json_string(self, piece: Piece) -> Wait[bool]:
        """Read a JSON string with its quotes; the next character is the first."""
        piece('"')
        self.at += 1
        while True:
            match = _STRING_BODY.match(self.text, self.at)
            end = match.end() if match else self.at
            if self.text.startswith('"', end):
                piece(self.text[self.at : end + 1])
                self.at = end + 1
                return True
            if self.ended:
                end = len(self.text)  # a last backslash, too
            if end > self.at:
                piece(self.text[self.at : end])
                self.at = end
            if self.ended:
                return False
            yield

    def short_string(self, limit: int) -> Wait[str | None]:
        """The value of a JSON string; None if there is none, or it has more than `limit` characters."""
        if (yield from self.skip_space()) != '"':
            return None
        pieces = ['"']
        self.at += 1
        while True:
            match = _STRING_BODY.match(self.text, self.at)
            end = match.end() if match else self.at
            end = min(end, self.at + limit + 1)
            pieces.append(self.text[self.at : end])
            limit -= end - self.at
            self.at = end
            if limit < 0:
                return None
            if self.text.startswith('"', end):
                self.at += 1
                return decoded_string("".join(pieces) + '"')
            if self.ended:
                return None
            yield

    def _scalar(self, piece: Piece) -> Wait[bool]:
        seen = False
        while True:
            match = _SCALAR.match(self.text, self.at)
            if match and match[0]:
                seen = True
                piece(match[0])
                self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return seen and self.at < len(self.text)
            yield


def decoded_string(text: str) -> str | None:
    """The value of a JSON string, which UTF-8 can encode; None if it is not valid."""
    try:
        value = json.loads(text)
        value.encode()
    except ValueError:
        return None
    return value
