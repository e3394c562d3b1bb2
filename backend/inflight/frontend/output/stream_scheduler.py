"""Shares a thread fairly between streams, by measured cost.  Pure Python."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

__all__ = ["StreamScheduler"]

Key = TypeVar("Key", bound=Hashable)


class StreamScheduler(Generic[Key]):
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with costs that are known afterwards.

    Each key that has work waits with a *start tag*: the virtual time at which its work becomes due.  The key with the
    smallest tag is served next, and virtual time is the start tag of the key that was served last.  The cost of a turn
    advances only the key's own next tag.  So

    - among keys that always have work, none gets ahead of another by more than their two largest turns;
    - a key that has caught up waits for at most one turn of each other key;
    - equal tags are served in the order of their arrival.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Key]] = []  # a heap: start tag, order of arrival, key
        self._queued: set[Key] = set()
        self._due: dict[Key, float] = {}  # key -> its next start tag, if that lies beyond virtual time
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, key: Key) -> None:
        """The key has work; a key that is waiting keeps its place."""
        if key in self._queued:
            return
        self._queued.add(key)
        self._count += 1
        heappush(self._waiting, (max(self._now, self._due.get(key, 0.0)), self._count, key))

    def take(self) -> Key | None:
        """Remove and return the key to serve next; None if no key is waiting."""
        while self._waiting:
            start, _, key = heappop(self._waiting)
            if key in self._queued:
                self._queued.remove(key)
                self._now = start
                return key
        return None

    def charge(self, key: Key, cost: float) -> None:
        """The last turn cost `cost` (0 or more)."""
        self._due[key] = self._now + cost

    def charge_more(self, key: Key, cost: float) -> None:
        """Its last turn cost this much more."""
        self._due[key] = self._due.get(key, self._now) + cost

    def forget(self, key: Key) -> None:
        """The key will not come back."""
        self._due.pop(key, None)
        self._queued.discard(key)
