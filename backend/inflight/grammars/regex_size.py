"""The length of the shortest text that a regular expression matches, read off its counted repetitions.

llguidance writes out a text that is repeated: `((a{1000}){1000}){1000}` would be a text of 10^9 characters.  Its limits
end that after seconds; this check ends it at once.
"""

from __future__ import annotations

import re

__all__ = ["MAX_SHORTEST_MATCH", "check_regex", "check_regexes_of_lark"]

MAX_SHORTEST_MATCH = 32768

# Each piece matches without going back, so that a hostile expression takes no longer.
_PIECES = re.compile(
    r"""
    \\(?:[pPxuU]\{\w{0,99}\}|.)                # an escape
    | \[\^?\]?(?:\\.|[^\]\\])*\]?             # a class; the rest of a nested one counts as text
    | \(\?[a-zA-Z-]*\)                        # flags
    | \((?:\?(?:P?<\w{0,99}>|[a-zA-Z-]*:))?  # the beginning of a group
    | [)|]
    | \{(\d+)(?:,\d*)?\}\??                   # a counted repetition
    | [?*+]\??
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
# Texts and comments of Lark, which may contain slashes, and its regular expressions, which are group 1.
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|/((?:\\.|[^/\\\n])+)/?')


def check_regex(pattern: str, name: str = "the regular expression") -> None:
    """Refuse an expression with a part that matches only texts of more than MAX_SHORTEST_MATCH characters.

    Whether it is valid is not checked.

    Raises:
        ValueError: it has such a part.
    """
    # For each open group: the least length of the branches before, and of this one, and of its last piece.
    groups: list[list[float]] = [[float("inf"), 0, 0]]
    for piece in _PIECES.finditer(pattern):
        text, group = piece[0], groups[-1]
        if text == "|":
            groups[-1] = [min(group[0], group[1]), 0, 0]
        elif text == ")":
            least = min(group[0], group[1])
            if len(groups) > 1:
                groups.pop()
            _add(groups[-1], least)
        elif text.startswith("(") and not text.endswith(")"):
            groups.append([float("inf"), 0, 0])
        elif text[0] in "?*":
            group[1] -= group[2]
            group[2] = 0
        elif piece[1] is not None:
            least = group[2] * _count(piece[1])
            group[1] -= group[2]
            _add(group, least)
        elif text[0] not in "+^$(":
            _add(group, 1)
        if groups[-1][1] > MAX_SHORTEST_MATCH:
            raise ValueError(
                f"{name}: a part of it matches only texts of more than {MAX_SHORTEST_MATCH} characters: shorten it, "
                "or lower its repetition counts"
            )


def check_regexes_of_lark(grammar: str) -> None:
    """`check_regex` for each expression between slashes.

    Raises:
        ValueError: one is too long.
    """
    for found in _LARK.finditer(grammar):
        if found[1] is not None:
            check_regex(found[1], "a regular expression of the grammar")


def _add(group: list[float], length: float) -> None:
    group[1] += length
    group[2] = length


def _count(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9
