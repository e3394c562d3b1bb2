"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, and of newer models `[TOOL_CALLS]f[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from inflight_gateway.tool_parsers.base import MAX_NAME, TextParser
from inflight_gateway.tool_parsers.events import short_call_id
from inflight_gateway.tool_parsers.json_calls import Outcome, read_arguments, read_call
from inflight_gateway.tool_parsers.scanner import Marks, Wait

__all__ = ["MistralParser"]

_MARK, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS = Marks(_MARK)
_NAME = re.compile(r"[^\s\[\]{}\"']*")
_CALL_ID = re.compile(r"\w*")


class MistralParser(TextParser):
    """Calls after the mark: a list of objects, or a name and its arguments, with the mark before each."""

    MARKS, ENDS = (_MARK, _ID, _ARGS), (",",)

    def __init__(self, tools: Mapping[str, Any], new_id: Callable[[], str] = short_call_id) -> None:
        super().__init__(tools, new_id)

    def _parse(self) -> Wait[None]:
        scan, out = self._scan, self._out
        while (yield from scan.until(_MARKS, out.content)):
            scan.keep(_MARK)
            if (yield from scan.skip_space()) == "[":
                yield from self._list()
            else:
                yield from self._named()

    def _list(self) -> Wait[None]:
        scan, out = self._scan, self._out
        scan.at += 1
        while (yield from scan.skip_space()) == "{":
            outcome = yield from read_call(scan, out, lambda name: True)
            if outcome is Outcome.NONE:
                break
            if outcome is Outcome.BROKEN:
                yield from scan.rest(out.arguments)
            out.end()
            scan.keep()
            following = yield from scan.skip_space()
            if following != ",":
                if following == "]":
                    scan.at += 1
                    scan.keep()
                break
            scan.at += 1
        out.content(scan.kept())

    def _named(self) -> Wait[None]:
        scan, out = self._scan, self._out
        name = yield from scan.run(_NAME, MAX_NAME)
        if name:
            yield from scan.skip_space()
            if (yield from scan.accept(_ID)):
                yield from scan.run(_CALL_ID, MAX_NAME)
            yield from scan.accept(_ARGS)
            if (yield from scan.skip_space()) == "{":
                scan.drop()
                out.start(name)
                if not (yield from read_arguments(scan, out.arguments)):
                    yield from scan.rest(out.arguments)
                return out.end()
        out.content(scan.kept())
