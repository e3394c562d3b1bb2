"""Order of waiting requests and choice of preemption victims.

The scheduler asks a policy only three things: which request is next, where a new or preempted
one goes, and who must give way.  A new order is a new class here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from inflight.engine.request import Request

__all__ = ["FcfsPolicy", "Policy"]


class Policy(Protocol):
    """Holds the waiting requests; every method is called by the scheduler alone."""

    def __len__(self) -> int:
        """Requests waiting."""

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests, in the order in which they would be admitted."""

    def add(self, request: Request) -> None:
        """Queue a request that just arrived."""

    def add_first(self, request: Request) -> None:
        """Queue a request that was already admitted once (preempted), or whose leader was."""

    def peek(self) -> Request:
        """The request to admit next.  Only called when one waits."""

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted or aborted."""

    def victim(self, candidates: list[Request]) -> Request:
        """Who gives up its blocks, of requests (in order of admission) not yet in this step."""


class FcfsPolicy:
    """First come, first served; the latest admitted gives way first."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_first(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def remove(self, request: Request) -> None:
        if self._queue[0] is request:
            self._queue.popleft()
        else:
            self._queue.remove(request)

    def victim(self, candidates: list[Request]) -> Request:
        return candidates[-1]
