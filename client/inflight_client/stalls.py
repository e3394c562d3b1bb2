"""Finds streams of a blocking client that have stalled: a response is overdue."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

__all__ = ["Stalls"]

_CHECKS = 4  # times per `stall_timeout`


class _Waiting(Protocol):
    def check_stall(self, now: float, responds: dict[int, bool]) -> None: ...


class Stalls:
    """A thread that checks the open streams of one client while there are any.  It holds only weak references.

    Args:
        seconds: time without a response after which a stream has stalled.
    """

    def __init__(self, seconds: float) -> None:
        self._pause = seconds / _CHECKS
        self._lock = threading.Lock()  # guards the two below
        self._streams: weakref.WeakSet[_Waiting] = weakref.WeakSet()
        self._runs = False

    def watch(self, stream: _Waiting) -> None:
        """Call `stream.check_stall` a few times per `seconds`, until `forget` or its end."""
        with self._lock:
            self._streams.add(stream)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._loop, name="inflight-stalls", daemon=True).start()

    def forget(self, stream: _Waiting) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _loop(self) -> None:
        while True:
            time.sleep(self._pause)
            with self._lock:
                streams = list(self._streams)
                if not streams:
                    self._runs = False
                    return
            responds: dict[int, bool] = {}  # by server, so each is asked at most once per round
            while streams:
                streams.pop().check_stall(time.monotonic(), responds)
