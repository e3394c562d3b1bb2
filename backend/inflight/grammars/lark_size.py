"""The length of the shortest text of each rule of a context-free grammar, read off its counted repetitions.

llguidance writes repetitions out: `("a"{1000}){1000}` would be a text of 10^6 characters.  Some keep it busy for
minutes, without giving other threads a turn; this check refuses them at once.  The lengths are lower bounds: what this
reader does not understand counts as empty.
"""

from __future__ import annotations

import json
import re
from heapq import heappop, heappush
from typing import Any, NamedTuple

from inflight.grammars.regex_size import MAX_SHORTEST_MATCH, check_regex

__all__ = ["EmbeddedJson", "check_lark"]

_TEXT = r'"(?:\\.|[^"\\\n])*"?'
# Each piece matches without going back, so that a hostile grammar takes no longer.
_PIECES = re.compile(
    rf"""
    (?://|\#)[^\n]*                                                 # a comment
    | (?:^[ \t]*[?!]*(?P<rule>[A-Za-z_][\w-]*)(?:\.-?\d+)?          # the beginning of a rule: its name, priority,
        (?:\[(?:{_TEXT}|[^\]"\n])*\])?(?:::\w+)?\s*:(?::=|(?!:)))   #   attributes, parameter
    | (?P<text>{_TEXT}|'(?:\\.|[^'\\\n])*'?)(?:i\b)?
    | /(?P<regex>(?:\\.|[^/\\\n])+)(?:/[a-z]*)?
    | (?P<directive>%\w+)
    | ->\s*\w+                                                      # an alias
    | <(?P<tokens>\[)?[^<>\s]*>                                     # a special token, or ids as in `<[5-7,9]>`
    | (?P<class>\[(?:\\.|[^\]\\])*\]?)                              # of GBNF; Lark: an option
    | \{{\s*(?P<count>\d*)\s*(?:,\s*\d*\s*)?\}}
    | ~\s*(?P<times>\d+)(?:\s*\.\.\s*\d+)?
    | (?P<name>[A-Za-z_][\w-]*)(?:::\w+)?
    | (?P<operator>\.\.|[|&()?*+~])
    """,
    re.VERBOSE | re.MULTILINE,
)
_CHARACTER = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u\w{4}|x\w\w|[xu]\{\w*\}|u\w{4}|U\w{8}|.)|.", re.DOTALL)
_IN_A_RULE = ("%json", "%regex", "%lark")  # other directives are between rules
_DIGITS = re.compile("[0-9]+")
_SPACE = re.compile(r"\s*")
_TRUNCATED = 10**9  # counts above are the same

_Name = str | int  # an int: a part of a rule


class EmbeddedJson(NamedTuple):
    """The object behind a `%json`, and its place in the grammar."""

    start: int
    end: int
    value: dict[str, Any]


class _Alternative:
    """Attributes:
    owner: what it is an alternative of.
    length: of its texts and of its known parts.
    parts: the other rules and parts in it, with their numbers.
    """

    __slots__ = ("length", "owner", "parts")

    def __init__(self, owner: _Name) -> None:
        self.owner = owner
        self.length = 0
        self.parts: dict[_Name, int] = {}

    def add(self, part: _Name | None, length: int, count: int) -> None:
        """`count` times a part, or a text."""
        self.length += length * count
        if part is not None and count:
            self.parts[part] = self.parts.get(part, 0) + count


class _Reader:
    """Reads the rules of a grammar as alternatives."""

    def __init__(self, grammar: str) -> None:
        self.alternatives: list[_Alternative] = []
        self.defined: set[_Name] = set()
        self.embedded: list[EmbeddedJson] = []
        self.largest_id = -1  # of the tokens that it names so
        self._num_parts = 0
        self._last: tuple[_Name | None, int] = (None, 0)  # the item that a repetition repeats
        self._groups = [self._alternative(self._new_part())]
        self._is_gbnf = "::=" in grammar
        self._skips = False  # the next item counts as empty: it ends a range, or is negated
        self._has_bad_json = False
        position = 0
        while found := _PIECES.search(grammar, position):
            position = self._after_directive(grammar, found) if found["directive"] else found.end()
            self._read(found)
        self._finish_item()

    def _new_part(self) -> int:
        self._num_parts += 1
        return self._num_parts

    def _alternative(self, owner: _Name) -> _Alternative:
        self.defined.add(owner)
        self.alternatives.append(_Alternative(owner))
        return self.alternatives[-1]

    def _finish_item(self) -> None:
        self._groups[-1].add(*self._last, 1)
        self._last = (None, 0)

    def _item(self, part: _Name | None, length: int) -> None:
        self._finish_item()
        self._last = (None, 0) if self._skips else (part, length)
        self._skips = False

    def _repeat(self, count: int) -> None:
        """The last item becomes a part of its own, which is judged even where nothing needs it."""
        repeated = self._alternative(self._new_part())
        repeated.add(*self._last, count)
        self._last = (repeated.owner, 0)

    def _read(self, found: re.Match[str]) -> None:
        if found["rule"]:
            self._finish_item()
            self._groups, self._skips = [self._alternative(found["rule"])], False
        elif found["text"]:
            self._item(None, max(0, len(_CHARACTER.findall(found["text"])) - 2))
        elif found["regex"]:
            self._item(None, check_regex(found["regex"], "a regular expression of the grammar"))
        elif found["tokens"]:
            self.largest_id = max(self.largest_id, *map(_number, _DIGITS.findall(found[0])), -1)
        elif found["class"]:
            self._item(None, int(self._is_gbnf))
        elif found["name"]:
            self._item(found["name"], 0)
        elif found["count"] is not None or found["times"]:
            self._repeat(_number(found["count"] or found["times"] or "0"))
        elif found["operator"]:
            self._operate(found["operator"])

    def _operate(self, operator: str) -> None:
        if operator in "?*":
            self._last = (None, 0)
        elif operator in ("..", "~"):
            self._skips = True
        elif operator in "|&":  # what matches both is as long as either
            self._finish_item()
            self._groups[-1] = self._alternative(self._groups[-1].owner)
        elif operator == "(":
            self._item(None, 0)
            self._groups.append(self._alternative(self._new_part()))
        elif operator == ")" and len(self._groups) > 1:
            self._finish_item()
            self._last = (self._groups.pop().owner, 0)

    def _after_directive(self, grammar: str, found: re.Match[str]) -> int:
        """Where it ends, with the JSON behind a directive such as `%json`."""
        if found["directive"] not in _IN_A_RULE:
            self._finish_item()
            self._groups = [self._alternative(self._new_part())]
        start = _SPACE.match(grammar, found.end()).end()  # type: ignore[union-attr]  # it matches anything
        if self._has_bad_json or found["directive"] == "%lark" or grammar[start : start + 1] != "{":
            return found.end()  # a grammar in braces is read like its surroundings
        try:
            value, end = json.JSONDecoder().raw_decode(grammar, start)
        except (ValueError, RecursionError):
            self._has_bad_json = True  # none is read again: a hostile grammar takes no longer
            return found.end()
        if found["directive"] == "%json":
            self.embedded.append(EmbeddedJson(start, end, value))
        return end


def check_lark(grammar: str, num_tokens: int) -> list[EmbeddedJson]:
    """Refuse a grammar with a part that matches only texts of more than MAX_SHORTEST_MATCH characters.

    And one that names tokens which do not exist.  Whether it is valid is not checked.  A part
    without any text, as by recursion without an end, is left to llguidance.

    Args:
        grammar: Lark as llguidance reads it, GBNF or EBNF.
        num_tokens: it may name tokens by smaller ids.

    Returns:
        The JSON Schemas in it that are objects, in order.

    Raises:
        ValueError: it has such a part, or names a token that does not exist.
    """
    reader = _Reader(grammar)
    if reader.largest_id >= num_tokens:
        vocabulary = f"the vocabulary has 0 to {num_tokens - 1}: name one of those"
        raise ValueError(f"the grammar names token {reader.largest_id}, and {vocabulary}")
    users: dict[_Name, list[_Alternative]] = {}
    # Knuth's generalization of Dijkstra's algorithm (Information Processing Letters 6, 1977): shortest parts first.
    line: list[tuple[int, int, _Alternative]] = []

    def line_up(alternative: _Alternative) -> None:
        if alternative.length > MAX_SHORTEST_MATCH:
            raise ValueError(
                f"the grammar: a part of it matches only texts of more than {MAX_SHORTEST_MATCH} characters: "
                "shorten it, or lower its repetition counts"
            )
        heappush(line, (alternative.length, id(alternative), alternative))

    for alternative in reader.alternatives:
        for part in alternative.parts.keys() & reader.defined:
            users.setdefault(part, []).append(alternative)
        alternative.parts = {part: count for part, count in alternative.parts.items() if part in reader.defined}
        if not alternative.parts:
            line_up(alternative)
    known: set[_Name] = set()
    while line:
        length, _, shortest = heappop(line)
        if shortest.owner in known:
            continue
        known.add(shortest.owner)
        for user in users.get(shortest.owner, ()):
            user.length += length * user.parts.pop(shortest.owner)
            if not user.parts:
                line_up(user)
    return reader.embedded


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else _TRUNCATED
