"""An index of a text: finds earlier occurrences of its last tokens.  No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

__all__ = ["Occurrences", "match_length"]

_FACTOR = 0x9E3779B97F4A7C15  # Fibonacci hashing: any odd number with well mixed bits
_MASK = 2**64 - 1
_AT_ONCE = 64  # a text with at least so many tokens is sorted instead of entering the dictionary one by one


class Occurrences:
    """The places after each run of `width` tokens of a growing text.

    Initial tokens are sorted, which takes 12 bytes per token; later ones are in a dictionary, at some 150 bytes.
    Runs are compared by a hash: the caller must compare the tokens.

    Args:
        tokens: the text; it can only grow.
        width: tokens of a run.
    """

    def __init__(self, tokens: array[int], width: int) -> None:
        self._tokens = tokens
        self._width = width
        self._end = 0  # places up to this one are indexed
        self._keys: np.ndarray | None = None  # uint64, sorted
        self._places = np.empty(0, dtype=np.int32)  # of each key, increasing where keys are equal
        self._latest: dict[int, int] = {}
        self._before: dict[int, int] = {}  # place -> the previous place after an equal run

    def key(self, tokens: Sequence[int]) -> int:
        """The key of a run of `width` tokens."""
        key = 0
        for token in tokens:
            key = (key * _FACTOR + token + 1) & _MASK
        return key

    def learn(self, end: int) -> None:
        """Index the places up to `end`, without reading tokens after it."""
        width = self._width
        if self._keys is None and end - self._end >= _AT_ONCE:
            self._sort(end)
        for place in range(max(self._end + 1, width), end + 1):
            key = self.key(self._tokens[place - width : place])
            earlier = self._latest.get(key)
            if earlier is not None:
                self._before[place] = earlier
            self._latest[key] = place
        self._end = max(self._end, end)

    def behind(self, key: int, limit: int) -> list[int]:
        """The last `limit` places after a run with this key, the latest first."""
        found: list[int] = []
        place = self._latest.get(key)
        while place is not None and len(found) < limit:
            found.append(place)
            place = self._before.get(place)
        if self._keys is not None and len(found) < limit:
            wanted = np.uint64(key)
            end = int(self._keys.searchsorted(wanted, side="right"))
            start = max(int(self._keys.searchsorted(wanted)), end - limit + len(found))
            found += self._places[start:end][::-1].tolist()
        return found

    def _sort(self, end: int) -> None:
        width = self._width
        tokens = np.array(self._tokens[:end], dtype=np.uint64) + np.uint64(1)
        keys = np.zeros(max(0, end - width + 1), dtype=np.uint64)
        for i in range(width):
            keys = keys * np.uint64(_FACTOR) + tokens[i : i + len(keys)]
        order = keys.argsort(kind="stable")
        self._keys, self._places, self._end = keys[order], (order + width).astype(np.int32), end
        self._latest.clear()  # tokens that came one by one before are sorted, too
        self._before.clear()


def match_length(tokens: Sequence[int], place: int, context: Sequence[int], limit: int) -> int:
    """How many tokens directly before `place` equal the last ones of `context`; at most `limit`."""
    end = len(context)
    limit = min(limit, place, end)
    length = 0
    while length < limit and tokens[place - 1 - length] == context[end - 1 - length]:
        length += 1
    return length
