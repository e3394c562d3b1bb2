"""Chooses the server for the next attempt of a client with several servers.  No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from inflight_client.request import GenerationRequest

__all__ = ["Endpoints", "Routing", "split_urls"]

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


class Routing(Protocol):
    """Decides which server a request goes to."""

    def choose(self, request: GenerationRequest, loads: Mapping[int, int]) -> int:
        """Index of the server for an attempt; called by one thread at a time.

        Args:
            request: the request to send.
            loads: index of each server to choose from -> sequences that this client has in flight there.
        """


class Endpoints:
    """The servers in order of preference, and their recent failures.

    The first server that is not resting is chosen, or one of these by `routing`.  A server rests for a second after a
    failure, twice as long after each further failure in a row, at most 30 s, and at least as long as it asks for.  An
    answer ends the rest.  If all servers rest, the one with the shortest remaining rest is chosen.  Threads can share
    the object.

    Args:
        count: number of servers, at least 1.
        clock: seconds now.
        routing: None: the order of preference.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic, routing: Routing | None = None) -> None:
        self._clock = clock
        self._routing = routing
        self._lock = threading.Lock()  # guards all below
        self._in_flight = [0] * count
        self._failures = [0] * count
        self._rests_until = [0.0] * count
        self._asked_until = [0.0] * count

    def __len__(self) -> int:
        return len(self._failures)

    def choose(self) -> int:
        """Index of the preferred server, for calls that any server can answer."""
        with self._lock:
            return self._rested()[0]

    def begin(self, request: GenerationRequest) -> int:
        """Index of the server for an attempt, which counts as in flight until `end`."""
        with self._lock:
            rested = self._rested()
            index = rested[0]
            if self._routing is not None:
                index = self._routing.choose(request, {one: self._in_flight[one] for one in rested})
            self._in_flight[index] += request.n
            return index

    def end(self, index: int, request: GenerationRequest) -> None:
        """An attempt is over."""
        with self._lock:
            self._in_flight[index] -= request.n

    def _rested(self) -> list[int]:
        """The servers that are not resting; if all are, the one with the shortest remaining rest."""
        now = self._clock()
        rests = [max(0.0, until - now) for until in self._rests_until]
        shortest = min(rests)
        return [rests.index(shortest)] if shortest else [index for index, rest in enumerate(rests) if not rest]

    def failed(self, index: int, retry_after: float | None = None) -> None:
        """An attempt failed there; the server asked for no new attempt within `retry_after` seconds."""
        with self._lock:
            rest = min(_LONGEST_REST, _FIRST_REST * 2 ** min(self._failures[index], 16))
            self._failures[index] += 1
            now = self._clock()
            self._asked_until[index] = now + (retry_after or 0.0)
            self._rests_until[index] = now + max(rest, retry_after or 0.0)

    def answered(self, index: int) -> None:
        """The server answered: its rest ends."""
        if self._failures[index]:
            with self._lock:
                self._failures[index], self._rests_until[index], self._asked_until[index] = 0, 0.0, 0.0

    def asked_wait(self) -> float:
        """Seconds until at least one server accepts a new attempt, according to the servers' hints."""
        with self._lock:
            return max(0.0, min(self._asked_until) - self._clock())
