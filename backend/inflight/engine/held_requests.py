"""Requests that wait for something outside of the engine: admission answered "not yet".  No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inflight.engine.messages import RequestFailed
from inflight.engine.policies.base import NotYet
from inflight.engine.request import Request

__all__ = ["HELD_POLL_SECONDS", "HeldRequests"]

# Between two looks at requests that all wait for something outside of the engine (`EngineCore.only_holds`).
HELD_POLL_SECONDS = 0.002


class HeldRequests:
    """They are out of the queue, so that others pass them, and are asked about again each step.

    Args:
        limit: requests held at most.
        clock: seconds; a request that is held past its deadline fails.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._requests: dict[Request, None] = {}  # in the order in which they were held

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def hold(self, request: Request, answer: NotYet) -> None:
        """Keep a request.  Its deadline counts from the first time that it was held since it last ran."""
        self._requests[request] = None
        if request.held_until is None:
            request.held_until = self._clock() + answer.seconds

    def recall(self, admits: Callable[[Request], bool | NotYet]) -> tuple[list[Request], list[RequestFailed]]:
        """Let go of the requests that have another answer now, and of those that wait in vain or past their deadline.

        Returns:
            The former, in the order in which they were held; the latter, with the reason.
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
        return ready, list(failed.values())

    def remove(self, request: Request) -> None:
        """A held request ended."""
        del self._requests[request]
