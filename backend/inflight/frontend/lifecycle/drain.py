"""Drains a model instance: it accepts no new requests, and its open ones end.

    serving -> draining: new requests are refused, open ones can finish within `drain_timeout`
            -> drained: requests still open then ended with UNAVAILABLE; new requests are still refused

There is no way back: a drained instance is unloaded, reloaded or stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from inflight.frontend.errors import RequestError

__all__ = ["Drain"]

_POLL_SECONDS = 0.02


class _Streams(Protocol):
    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    def refuse_new(self, make_error: Callable[[], RequestError]) -> None:
        """Refuse every request from now on."""

    def end_all(self, error: RequestError) -> None:
        """End all open streams with an error."""


class Drain:
    """Drains once; later calls join the same drain.

    Args:
        timeout: seconds for open requests to finish.
        log: called with (level, line).
        show: called with the new state, "draining" or "drained".
    """

    def __init__(
        self,
        streams: _Streams,
        timeout: float,
        log: Callable[[str, str], None],
        show: Callable[[str], None] = lambda state: None,
    ) -> None:
        self._streams = streams
        self._timeout = timeout
        self._log = log
        self._show = show
        self._lock = threading.Lock()  # guards the one below
        self._result: Future[dict[str, Any]] | None = None
        self._deadline = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def draining(self) -> bool:
        """Whether new requests are refused; stays true once drained."""
        return self._result is not None

    @property
    def drained(self) -> bool:
        """Whether, in addition, every request has ended."""
        return self._result is not None and self._result.done()

    def begin(self, cause: str) -> Future[dict[str, Any]]:
        """Accept no new requests from now on; returns at once.

        Args:
            cause: why, for the log.

        Returns:
            When drained: the numbers of requests that `finished` and were `ended`, and the `seconds` it took.
        """
        with self._lock:
            if self._result is not None:
                return self._result
            self._result = Future()
            self._deadline = time.monotonic() + self._timeout
            self._streams.refuse_new(self._refusal)
            count = self._streams.num_open
            self._thread = threading.Thread(target=self._run, args=(count,), name="drain", daemon=True)
        self._show("draining")
        self._log("info", f"draining ({cause}): {count} open requests have {self._timeout:g} s to finish")
        self._thread.start()
        return self._result

    def stop(self) -> None:
        """The model is being unloaded: stop waiting for open requests."""
        self._stopping.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _refusal(self) -> RequestError:
        text = "the model is draining: it takes no new requests"
        return RequestError("UNAVAILABLE", text, self._seconds_left(), ending="draining")

    def _seconds_left(self) -> float:
        """Seconds until this instance is certainly gone or replaced, at least 1."""
        return max(1.0, self._deadline - time.monotonic())

    def _run(self, count: int) -> None:
        assert self._result is not None
        start = time.monotonic()
        while self._streams.num_open and time.monotonic() < self._deadline and not self._stopping.is_set():
            time.sleep(_POLL_SECONDS)
        left = self._streams.num_open
        if left:
            self._streams.end_all(
                RequestError(
                    "UNAVAILABLE",
                    f"the model is draining: the request did not finish within drain_timeout={self._timeout:g} s; "
                    "its output so far is valid, and another server can go on from there",
                    self._seconds_left(),
                )
            )
            while self._streams.num_open and not self._stopping.is_set():
                time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - start
        self._log(
            "info", f"drained in {seconds:.1f} s: {count - left} requests finished, {left} ended by drain_timeout"
        )
        self._show("drained")
        self._result.set_result({"finished": count - left, "ended": left, "seconds": round(seconds, 3)})
