"""The length of the shortest text that a regular expression matches, read off its counted repetitions.

llguidance writes out a text that is repeated: `((a{1000}){1000}){1000}` would be a text of 10^9 characters.  Its limits
end that after seconds; this check ends it at once.
"""

from __future__ import annotations

import re

__all__ = ["MAX_SHORTEST_MATCH", "check_regex"]

MAX_SHORTEST_MATCH = 32768
_ENDLESS = 2**63  # longer than any text

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


def check_regex(pattern: str, name: str = "the regular expression") -> int:
    """Refuse an expression with a part that matches only texts of more than MAX_SHORTEST_MATCH characters.

    Whether it is valid is not checked.

    Returns:
        Characters of the shortest text, or fewer.

    Raises:
        ValueError: it has such a part.
    """
    # For each open group: the least length of the branches before, and of this one, and of its last piece.
    groups: list[list[int]] = [[_ENDLESS, 0, 0]]
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
            groups.append([_ENDLESS, 0, 0])
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
    return min(groups[0][0], groups[0][1])


def _add(group: list[int], length: int) -> None:
    group[1] += length
    group[2] = length


def _count(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9
