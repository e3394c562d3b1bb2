"""Stop strings: found in a growing text, in time that does not depend on how many there are.

The automaton is that of Aho and Corasick (CACM 18:6, 1975): each character of a text is looked at once, whatever
it may be the beginning of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ahocorasick_rs import AhoCorasick, Implementation

__all__ = ["StopChecker", "StopStrings"]

# Places per call at which held text is tried as the beginning of a stop string, beside the new characters.
_MAX_TRIES = 64


class StopStrings:
    """The stop strings of a request, ready to search for; its sequences share them.

    Args:
        stop: non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Not the library's choice, which for few but long strings is a table of hundreds of megabytes.
        automaton = AhoCorasick(stop, store_patterns=False, implementation=Implementation.ContiguousNFA)
        self._find = automaton.find_matches_as_indexes
        self._sorted = sorted(stop)
        self._first_characters = frozenset(text[0] for text in stop)

    def find(self, text: str) -> tuple[int, int] | None:
        """Start and end of the match that ends first, and of those the longest; None without one."""
        matches = self._find(text)
        return matches[0][1:] if matches else None

    def first_beginning(self, text: str, tries: int) -> int:
        """The first place from which the rest of `text` is the beginning of a stop string; `len(text)` if there is
        none.  Of more than `tries` places the answer is the first one that was not tried."""
        end = min(tries, len(text))
        for place in range(end):
            if text[place] in self._first_characters:
                rest = text[place:]
                after = bisect_left(self._sorted, rest)  # of the strings that begin with it, the first
                if after < len(self._sorted) and self._sorted[after].startswith(rest):
                    return place
        return end


class StopChecker:
    """Finds the first stop string in a growing text, and holds back text that may become one.

    The first to *end* wins, and of those the longest, so the result does not depend on how the
    text is cut into chunks.

    Args:
        include_stop_str: keep the matched string in the text.
    """

    def __init__(self, stop: StopStrings, include_stop_str: bool = False) -> None:
        self._stop = stop
        self._include = include_stop_str
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text that may be shown, matched stop string or None)."""
        tries = len(text) + _MAX_TRIES  # a long text that only looked like a stop string is let go bit by bit
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
