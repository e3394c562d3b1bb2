"""Llama 3: `{"name": "f", "parameters": {...}}`, several separated by `; `, optionally after `<|python_tag|>`."""

from __future__ import annotations

from inflight_gateway.tool_parsers.base import TextParser
from inflight_gateway.tool_parsers.json_calls import Outcome, read_call
from inflight_gateway.tool_parsers.scanner import Marks, Wait

__all__ = ["Llama3Parser"]

_TAG = "<|python_tag|>"
_TAGS = Marks(_TAG)


class Llama3Parser(TextParser):
    """Calls at the beginning of the answer, or after the tag.

    An answer can be JSON without being a call, so only an object with the name of a tool and parameters is a call.
    """

    MARKS, ENDS = (_TAG,), (";",)

    def _parse(self) -> Wait[None]:
        scan, out = self._scan, self._out
        scan.keep()
        yield from scan.skip_space()
        yield from scan.accept(_TAG)
        yield from self._calls()
        while (yield from scan.until(_TAGS, out.content)):
            scan.keep(_TAG)
            yield from self._calls()

    def _calls(self) -> Wait[None]:
        scan, out = self._scan, self._out
        while (yield from scan.skip_space()) == "{":
            outcome = yield from read_call(scan, out, self._tools.__contains__, needs_arguments=True)
            if outcome is Outcome.NONE:
                break
            if outcome is Outcome.BROKEN:
                yield from scan.rest(out.arguments)
            out.end()
            scan.keep()
            yield from scan.skip_space()
            yield from scan.accept(";")
        out.content(scan.kept())
