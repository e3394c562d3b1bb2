"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from inflight_gateway.tool_parsers.base import TextParser
from inflight_gateway.tool_parsers.json_calls import Outcome, read_call
from inflight_gateway.tool_parsers.scanner import Marks, Wait

__all__ = ["HermesParser"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING, _CLOSING = Marks(_OPEN), Marks(_CLOSE)


class HermesParser(TextParser):
    """Calls between marks.  Unknown names are passed on: the client can tell the model that the tool does not exist."""

    MARKS, ENDS = (_OPEN,), (_CLOSE,)

    def _parse(self) -> Wait[None]:
        while (yield from self._scan.until(_OPENING, self._out.content)):
            self._scan.keep(_OPEN)
            yield from self._calls()

    def _calls(self) -> Wait[None]:
        """The text between the marks: one call, or several in a row."""
        scan, out = self._scan, self._out
        while (yield from scan.skip_space()) == "{":
            outcome = yield from read_call(scan, out, lambda name: True)
            if outcome is Outcome.NONE:
                break
            if outcome is Outcome.BROKEN:
                yield from scan.until(_CLOSING, out.arguments)
                return out.end()
            out.end()
            scan.keep()
            yield from scan.skip_space()
            if (yield from scan.accept(_CLOSE)):
                return scan.drop()
        out.content(scan.kept())
