"""Limits the number of open requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from inflight.frontend.errors import RequestError

__all__ = ["OpenLimit"]


class OpenLimit:
    """Counts open requests and their sequences, and gives each request its id.  Any thread can call it.

    Args:
        max_sequences: maximum number of open sequences; 0: no limit.
        first_id: id of the first request.

    Attributes:
        num_requests: accepted requests that have not ended.
        num_sequences: sequences of those requests.
    """

    def __init__(self, max_sequences: int = 0, first_id: int = 1) -> None:
        self._max_sequences = max_sequences
        self._lock = threading.Lock()  # guards all below
        self.num_requests = self.num_sequences = 0
        self._next_id = first_id
        self._refusal: Callable[[], RequestError] | None = None

    def take(self, count: int) -> int:
        """Reserve room for a request of `count` sequences; returns its id.  Raises RequestError if there is no room."""
        limit = self._max_sequences
        if limit and count > limit:
            raise RequestError("INVALID_ARG", f"n={count} is more than the {limit} sequences that may be open at once")
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if limit and self.num_sequences + count > limit:
                raise RequestError(
                    "UNAVAILABLE",
                    f"the queue is full: {self.num_sequences} sequences are open and {limit} are "
                    "allowed (max_num_seqs + max_queue_size); try again later",
                )
            self.num_requests += 1
            self.num_sequences += count
            self._next_id += 1
            return self._next_id - 1

    def give_back(self, count: int) -> None:
        """A request of `count` sequences has ended."""
        with self._lock:
            self.num_requests -= 1
            self.num_sequences -= count

    def close(self, make_error: Callable[[], RequestError]) -> None:
        """Refuse every request from now on; accepted requests continue."""
        with self._lock:
            self._refusal = make_error
