"""Finds stop strings in a growing text, in a time that does not depend on their number.

The automaton is that of Aho and Corasick (CACM 18:6, 1975): it reads each character of a text once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ahocorasick_rs import AhoCorasick, Implementation

__all__ = ["StopChecker", "StopStrings"]

# Positions of held text that one call tries as the beginning of a stop string, in addition to the new characters.
_MAX_TRIES = 64


class StopStrings:
    """The stop strings of a request, ready to search for; its sequences share them.

    Args:
        stop: non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # The library's default for few but long strings is a table of hundreds of megabytes.
        automaton = AhoCorasick(stop, store_patterns=False, implementation=Implementation.ContiguousNFA)
        self._find = automaton.find_matches_as_indexes
        self._sorted = sorted(stop)
        self._first_characters = frozenset(text[0] for text in stop)

    def find(self, text: str) -> tuple[int, int] | None:
        """Start and end of the match that ends first, the longest one of several; None without one."""
        matches = self._find(text)
        return matches[0][1:] if matches else None

    def first_beginning(self, text: str, tries: int) -> int:
        """The first position from which the rest of `text` is the beginning of a stop string; `len(text)` if there is
        none.  After `tries` positions without success, the next position."""
        end = min(tries, len(text))
        for place in range(end):
            if text[place] in self._first_characters:
                rest = text[place:]
                after = bisect_left(self._sorted, rest)  # the first string that can begin with it
                if after < len(self._sorted) and self._sorted[after].startswith(rest):
                    return place
        return end


class StopChecker:
    """Finds the first stop string in a growing text, and holds back text that can become one.

    The match that *ends* first counts, the longest one of several, so the result does not depend on how the
    text is divided into chunks.

    Args:
        include_stop_str: keep the matched string in the text.
    """

    def __init__(self, stop: StopStrings, include_stop_str: bool = False) -> None:
        self._stop = stop
        self._include = include_stop_str
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text to show, matched stop string or None)."""
        tries = len(text) + _MAX_TRIES  # a long held text that does not match is released in parts
        text = self._held + text
        match = self._stop.find(text)
        if match is not None:
            start, end = match
            return text[: end if self._include else start], text[start:end]
        cut = self._stop.first_beginning(text, tries)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back, for a sequence that ended without a match."""
        held, self._held = self._held, ""
        return held
