"""Several servers for one client: which of them gets the next attempt.  No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["Endpoints", "split_urls"]

_FIRST_REST, _LONGEST_REST = 1.0, 30.0  # seconds


def split_urls(url: str | Sequence[str] | None) -> list[str | None]:
    """The addresses of a client: one, several separated by commas, or a list of them; None for the default.

    Raises:
        ValueError: a list without an address, or an empty one among several.
    """
    if url is None:
        return [None]
    urls = [part.strip() for part in url.split(",")] if isinstance(url, str) else list(url)
    if not urls or (len(urls) > 1 and not all(urls)):
        raise ValueError(f"url={url!r}: give one address, or several without an empty one")
    return list(urls)


class Endpoints:
    """The servers in the order of preference, and which of them failed lately.

    The first that did not fail lately is chosen.  One that failed rests for a second, twice as long after each
    failure in a row, at most 30 s, and as long as it asked for; an answer ends that.  If all rest, the one is
    chosen whose rest ends first.  Threads may share it.

    Args:
        count: number of servers, at least 1.
        clock: seconds now.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._failures = [0] * count
        self._rests_until = [0.0] * count
        self._asked_until = [0.0] * count

    def __len__(self) -> int:
        return len(self._failures)

    def choose(self) -> int:
        """Index of the server for the next attempt."""
        with self._lock:
            now = self._clock()
            rests = [max(0.0, until - now) for until in self._rests_until]
            return rests.index(min(rests))

    def failed(self, index: int, retry_after: float | None = None) -> None:
        """An attempt failed there; the server asked not to be tried again for `retry_after` seconds."""
        with self._lock:
            rest = min(_LONGEST_REST, _FIRST_REST * 2 ** min(self._failures[index], 16))
            self._failures[index] += 1
            now = self._clock()
            self._asked_until[index] = now + (retry_after or 0.0)
            self._rests_until[index] = now + max(rest, retry_after or 0.0)

    def answered(self, index: int) -> None:
        """It is well."""
        if self._failures[index]:
            with self._lock:
                self._failures[index], self._rests_until[index], self._asked_until[index] = 0, 0.0, 0.0

    def asked_wait(self) -> float:
        """Seconds until there is a server that has not asked to be left alone."""
        with self._lock:
            return max(0.0, min(self._asked_until) - self._clock())
