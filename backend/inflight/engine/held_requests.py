"""Requests that wait for something outside the engine: admission answered "not yet".  No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inflight.engine.deltas import RequestFailed
from inflight.engine.policies.base import MAX_HELD, NotYet, RequestQueue
from inflight.engine.request import Request

__all__ = ["HELD_POLL_SECONDS", "HeldRequests"]

# Seconds between two looks at requests that all wait for something outside the engine (`EngineCore.only_holds`).
HELD_POLL_SECONDS = 0.002


class HeldRequests:
    """Held requests: they are out of the queue, so that others pass them, and admission judges them again in each step.

    Args:
        queue: where they wait before they are held, and after.
        clock: seconds; a request that is held past its deadline fails.

    Attributes:
        limit: most requests held.
    """

    def __init__(self, queue: RequestQueue, clock: Callable[[], float], limit: int = MAX_HELD) -> None:
        self.limit = limit
        self._queue = queue
        self._clock = clock
        self._requests: dict[Request, None] = {}  # in the order in which they were held

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def hold(self, request: Request, answer: NotYet) -> bool:
        """Take a request out of the queue; False if no more can be held.

        Its deadline counts from now: it may have been ready before, and then waited for room in the queue.
        """
        if len(self._requests) >= self.limit:
            return False
        self._queue.remove(request)
        self._requests[request] = None
        request.held_until = self._clock() + answer.seconds
        return True

    def recall(self, admits: Callable[[Request], bool | NotYet]) -> list[RequestFailed]:
        """Return requests whose answer has changed to the front of the queue, in the order in which they were held.

        Returns:
            The failures of requests that can never start, or waited past their deadline.
        """
        now = self._clock()
        ready: list[Request] = []
        failed: dict[Request, RequestFailed] = {}
        for request in self._requests:
            answer = admits(request)
            if not isinstance(answer, NotYet):
                ready.append(request)
            elif answer.failure:
                failed[request] = RequestFailed(request.request_id, "INVALID_ARG", answer.failure)
            elif request.held_until is not None and now >= request.held_until:
                text = f"the request waited too long for {answer.reason}; try again later"
                failed[request] = RequestFailed(request.request_id, "UNAVAILABLE", text)
        for request in [*ready, *failed]:
            del self._requests[request]
        for request in reversed(ready):
            request.held_until = None
            self._queue.add_first(request)
        return list(failed.values())

    def remove(self, request: Request) -> None:
        """A held request ended."""
        del self._requests[request]
