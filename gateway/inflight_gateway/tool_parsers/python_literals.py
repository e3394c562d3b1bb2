"""Python literals as JSON.  Their strings are read by `ast`; nothing is ever evaluated."""

from __future__ import annotations

import ast
import json
import re

from inflight_gateway.tool_parsers.typed_values import json_text, parsed_json

__all__ = ["literal_json"]

# The tokens of a literal.  Only these reach Python's parser, which long or deep expressions can exhaust.
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r'|(?P<long>"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""' + r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*''')"
    r'|(?P<string>"[^"\\]*(?:\\.[^"\\]*)*"' + r"|'[^'\\]*(?:\\.[^'\\]*)*')"
    r"|(?P<number>[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w))"
    r"|(?P<word>(?:True|False|None|true|false|null)(?!\w))"
    r"|(?P<sign>[()\[\]{},:])",
    re.DOTALL,
)
_ESCAPE_OR_BREAK = re.compile(r"\\.|[\r\n]", re.DOTALL)
_ESCAPES = "\\'\"abfnrtvxuUN01234567\n"
_WORDS = {"true": "True", "false": "False", "null": "None"}


def literal_json(source: str) -> str | None:
    """JSON of a Python or JSON literal: strings, numbers, True, False, None, lists, tuples and dicts.

    None if it is anything else.
    """
    if parsed_json(source) is not None or source.strip() == "null":
        return source.strip()
    pieces: list[str] = []
    at, before = 0, None
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None or (match.lastgroup == "number" == before):
            return None
        at, kind = match.end(), match.lastgroup
        before = before if kind == "space" else kind
        pieces.append(_token(match[0], kind))
    try:
        return json_text(ast.literal_eval("".join(pieces).strip()))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _token(text: str, kind: str | None) -> str:
    """As Python's parser takes it without warnings; models break lines within strings."""
    if kind == "space":
        return " "
    if kind in ("string", "long"):
        return _ESCAPE_OR_BREAK.sub(lambda found: _escaped(found[0]), text)
    return _WORDS.get(text, text)


def _escaped(text: str) -> str:
    if text in "\r\n":
        return json.dumps(text)[1:-1]
    return text if text[1] in _ESCAPES else "\\" + text
