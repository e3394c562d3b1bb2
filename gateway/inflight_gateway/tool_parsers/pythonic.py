"""Llama 4 and others: `[f(a=1), g(b="x")]`, a list of Python calls."""

from __future__ import annotations

import re
from collections.abc import Mapping

from inflight_gateway.tool_parsers.base import MAX_NAME, TextParser
from inflight_gateway.tool_parsers.python_literals import literal_json
from inflight_gateway.tool_parsers.scanner import Wait
from inflight_gateway.tool_parsers.typed_values import json_text

__all__ = ["PythonicParser"]

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]*")
_PLAIN = re.compile(r"[^\"'()\[\]{},]*")
_BODIES = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in ('"', "'")}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 64
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")


class PythonicParser(TextParser):
    """An answer that is a list of calls of known tools, with literals as arguments.

    A call begins with its first argument that can be read; each argument is passed on when it is complete.  One without
    a name gets that of the schema's property at its place.
    """

    MARKS, ENDS = (_START, _END), (",", "]")

    def _parse(self) -> Wait[None]:
        scan, out = self._scan, self._out
        scan.keep()
        yield from scan.skip_space()
        yield from scan.accept(_START)
        if (yield from scan.skip_space()) == "[":
            scan.at += 1
            yield from self._calls()
        out.content(scan.kept())
        yield from scan.rest(out.content)

    def _calls(self) -> Wait[None]:
        scan, out = self._scan, self._out
        while (yield from self._call()):
            out.end()
            scan.keep()
            if (yield from scan.skip_space()) != ",":
                if (yield from scan.accept("]")):
                    scan.keep()
                    yield from scan.skip_space()
                    if (yield from scan.accept(_END)):
                        scan.keep()
                return
            scan.at += 1

    def _call(self) -> Wait[bool]:
        """One call of the list; False, with nothing sent, if it is none."""
        scan, out = self._scan, self._out
        yield from scan.skip_space()
        name = yield from scan.run(_NAME, MAX_NAME)
        if name not in self._tools or name is None or not (yield from scan.accept("(")):
            return False
        opening, number, end = "", 0, ","
        while end == ",":
            source, end = yield from self._argument()
            argument = self._read(name, number, source) if source.strip() else ""
            if not opening:
                if not end or argument is None or (not argument and end == ","):
                    return False
                scan.drop()
                out.start(name)
                opening = "{"
            if argument != "":
                out.arguments(opening + (argument if argument and end else source.strip()))
                opening = ", "
            number += 1
        if end:
            out.arguments("{}" if opening == "{" else "}")
        else:
            yield from scan.rest(out.arguments)
        return True

    def _argument(self) -> Wait[tuple[str, str]]:
        """The source of an argument, and what ended it: `,`, `)`, or "" for the end of what can be read."""
        scan = self._scan
        pieces: list[str] = []
        closing: list[str] = []
        while True:
            if match := _PLAIN.match(scan.text, scan.at):
                pieces.append(match[0])
                scan.at = match.end()
            following = yield from scan.peek()
            if following in _BODIES:
                yield from self._string(following, pieces)
                continue
            if not following or len(closing) > _MAX_DEPTH:
                return "".join(pieces), ""
            if not closing and following in (",", ")"):
                scan.at += 1
                return "".join(pieces), following
            if following in _CLOSING:
                closing.append(_CLOSING[following])
            elif following in (")", "]", "}"):
                if not closing or closing.pop() != following:
                    return "".join(pieces), ""
            elif following != ",":
                continue  # it came while we waited
            pieces.append(following)
            scan.at += 1

    def _string(self, quote: str, pieces: list[str]) -> Wait[None]:
        """A Python string with its quotes, one or three, to its end or that of the text."""
        scan = self._scan
        delimiter = quote * 3 if (yield from scan.accept(quote * 3)) else quote
        pieces.append(delimiter)
        scan.at += delimiter == quote
        while True:
            if match := _BODIES[quote].match(scan.text, scan.at):
                pieces.append(match[0])
                scan.at = match.end()
            if (yield from scan.accept(delimiter)):
                pieces.append(delimiter)
                return
            following = yield from scan.peek()
            if not following:
                return
            if following == quote or (following == "\\" and scan.ended):
                pieces.append(following)
                scan.at += 1
            elif scan.at + 1 == len(scan.text) and not scan.ended:
                yield  # a backslash: wait for the escaped character

    def _read(self, name: str, number: int, source: str) -> str | None:
        """`"key": value` as JSON; None if the argument is no literal, or has no name."""
        if match := _KEYWORD.match(source):
            key, source = match[1], source[match.end() :]
        else:
            schema = self._tools[name]
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            names = list(properties) if isinstance(properties, Mapping) else []
            if number >= len(names):
                return None
            key = names[number]
        value = literal_json(source)
        return None if value is None else f"{json_text(key)}: {value}"
