"""The simplest answer to each of the scheduler's questions.  No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request

__all__ = ["EveryStep", "FcfsOrder", "FreeBlocksAdmission", "StaticBudget", "last_in_order"]


class EveryStep:
    """All running requests are in every step."""

    def take(self, running: Sequence[Request]) -> list[Request]:
        return list(running)


class FcfsOrder:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def __contains__(self, request: object) -> bool:
        return request in self._queue

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_first(self, request: Request) -> None:
        self._queue.appendleft(request)

    def next_requests(self, limit: int) -> list[Request]:
        return list(islice(self._queue, limit))

    def remove(self, request: Request) -> None:
        if self._queue[0] is request:
            self._queue.popleft()
        else:
            self._queue.remove(request)

    def ahead(self, request: Request) -> list[Request]:
        return list(self._queue)

    def goes_before(self, request: Request, other: Request) -> bool:
        return False  # requests out of the queue have no order

    def position(self, request: Request, running: Sequence[Request]) -> int:
        return len(running)

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        return iter(())


def last_in_order(candidates: Sequence[Request]) -> Request:
    """The request that the order policy ranks last: the latest admitted under fcfs, of the least urgent class under
    priority.  Requests ahead of it never lose blocks to it, so the order's guarantee against starvation holds."""
    return candidates[-1]


class FreeBlocksAdmission:
    """Admits a request if the blocks for all of its present tokens and one more are available.

    The blocks are not reserved, but a request that could not even finish its prompt would only be
    preempted again.

    Args:
        watermark: share of the pool's blocks that stays free for the running requests; all blocks
            are available while none runs.
    """

    def __init__(self, watermark: float = 0.0) -> None:
        self._watermark = watermark

    def admits(self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool) -> bool:
        kept = int(self._watermark * pool.num_blocks) if running else 0
        return pool.missing_blocks(request, prefix) + kept <= pool.num_available


class StaticBudget:
    """As many tokens as the step has left."""

    def grant(self, request: Request, missing: int, limit: int) -> int:
        return limit
