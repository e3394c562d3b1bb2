"""Finds open streams that must end early: the client has cancelled, or the deadline has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from inflight.frontend.errors import RequestError
from inflight.frontend.output.request_state import RequestState

__all__ = ["CHECK_SECONDS", "CancellationWatcher"]

# Asking Triton takes about 0.15 ms per stream and delays its other messages.  So a round of checks starts this
# long after the previous one, and the rounds take at most a quarter of the time.
CHECK_SECONDS = 0.07
_REST = 3.0


class CancellationWatcher:
    """A thread that checks the open streams, round after round, while there are any.

    Args:
        streams: the open streams now.
        drop: gives up a stream; arguments: the stream, its ending (`ENDINGS`), and a function that makes its error.
        seconds: from one round to the next.
    """

    def __init__(
        self,
        streams: Callable[[], list[RequestState]],
        drop: Callable[[RequestState, str, Callable[[], RequestError]], None],
        seconds: float,
    ) -> None:
        self._streams = streams
        self._drop = drop
        self._seconds = seconds
        self._stopping = threading.Event()
        self._any_open = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="cancellation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is an open stream."""
        self._any_open.set()

    def stop(self) -> None:
        self._stopping.set()
        self._any_open.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._any_open.wait()
            self._any_open.clear()
            while not self._stopping.is_set() and (seconds := self._check_all()) is not None:
                self._stopping.wait(seconds)

    def _check_all(self) -> float | None:
        """Seconds until the next round; None: no stream is open.  An idle thread refers to no stream that has ended."""
        streams = self._streams()
        start = time.monotonic()
        for stream in streams:
            self._check(stream)
        took = time.monotonic() - start
        return self._pause(max(self._seconds, _REST * took)) if streams else None

    def _check(self, stream: RequestState) -> None:
        if stream.dropped:
            return
        if stream.deadline is not None and stream.deadline <= time.monotonic():
            self._drop(stream, "timeout", stream.late_error)
        elif _is_cancelled(stream):
            self._drop(stream, "cancelled", _cancelled)

    def _pause(self, seconds: float) -> float:
        """Seconds until the next round: fewer if a deadline comes sooner."""
        now = time.monotonic()
        left = [s.deadline - now for s in self._streams() if s.deadline is not None and not s.dropped]
        return max(0.001, min([seconds, *left]))


def _cancelled() -> RequestError:
    return RequestError("CANCELLED", "Request was cancelled")


def _is_cancelled(stream: RequestState) -> bool:
    try:
        return not stream.closed and stream.responder.is_cancelled()
    except Exception:  # closed meanwhile
        return False
