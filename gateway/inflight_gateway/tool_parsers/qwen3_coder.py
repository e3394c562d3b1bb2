"""Qwen3-Coder: `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`, with line breaks."""

from __future__ import annotations

import re
from typing import Any

from inflight_gateway.tool_parsers.base import MAX_NAME, TextParser
from inflight_gateway.tool_parsers.scanner import Marks, Wait
from inflight_gateway.tool_parsers.typed_values import is_text, json_text, property_schema, typed_value

__all__ = ["Qwen3CoderParser"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_OPENING = Marks(_OPEN, _FUNCTION)
_PARTS = Marks(_PARAMETER, _FUNCTION_END)
# Models leave out the end of a parameter now and then; the next part, on a line of its own, ends it too.
_VALUE_END = Marks("\n" + _PARAMETER_END, _PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END)
_NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(TextParser):
    """Calls with bare values, which become JSON of the types in the tool's schema.  `<tool_call>` can be missing."""

    MARKS, ENDS = (_OPEN,), (_CLOSE, _FUNCTION)

    def _parse(self) -> Wait[None]:
        scan, out = self._scan, self._out
        while mark := (yield from scan.until(_OPENING, out.content)):
            scan.keep(mark)
            yield from scan.skip_space()
            name = None
            if mark == _FUNCTION or (yield from scan.accept(_FUNCTION)):
                name = yield from self._name()
            if not name:
                out.content(scan.kept())
                continue
            scan.drop()
            out.start(name)
            yield from self._arguments(self._tools.get(name))
            out.end()
            scan.keep()
            yield from scan.skip_space()
            if (yield from scan.accept(_CLOSE)):
                scan.drop()
            else:
                out.content(scan.kept())

    def _arguments(self, parameters: Any) -> Wait[None]:
        """Between the marks of the function.  Text between parameters is nothing that arguments could hold."""
        scan, out = self._scan, self._out
        opening = "{"
        while (mark := (yield from scan.until(_PARTS, _nothing))) == _PARAMETER:
            key = yield from self._name()
            if key is None:
                continue
            out.arguments(f"{opening}{json_text(key)}: ")
            opening = ", "
            if not (yield from self._value(*property_schema(parameters, key))):
                return
        if mark:
            out.arguments("{}" if opening == "{" else "}")

    def _value(self, schema: Any, root: Any) -> Wait[bool]:
        """Up to the end of the parameter; whether there was one."""
        scan, out = self._scan, self._out
        yield from scan.accept("\n")
        text = is_text(schema, root)
        pieces: list[str] = []
        if text:
            out.arguments('"')
        mark = yield from scan.until(_VALUE_END, self._escaped if text else pieces.append)
        if text:
            out.arguments('"' if mark else "")
        else:
            out.arguments(typed_value("".join(pieces), schema, root) if mark else "".join(pieces))
        if mark and not mark.endswith(_PARAMETER_END):
            scan.at -= len(mark)  # the next part begins here
        return bool(mark)

    def _escaped(self, text: str) -> None:
        self._out.arguments(json_text(text)[1:-1])

    def _name(self) -> Wait[str | None]:
        """A name and the `>` after it."""
        name = yield from self._scan.run(_NAME, MAX_NAME)
        if name and (yield from self._scan.accept(">")):
            return name.strip() or None
        return None


def _nothing(text: str) -> None:
    """Discards the text that is read."""
