"""Returns memory to the system after large responses.

A response with log probabilities is joined from thousands of small texts.  glibc keeps the memory of freed ones between
others that are still in use, and would keep that of the largest response ever sent.
"""

from __future__ import annotations

import threading

from inflight.heap import CAN_TRIM, trim_heap

__all__ = ["LARGE_BYTES", "HeapTrim"]

LARGE_BYTES = 4 * 2**20
_DELAY = 1.0  # seconds: by then the response and what it was made from are gone, and one trim serves several


class HeapTrim:
    """Asks glibc to return free pages a second after a large response; other C libraries are left alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False

    def sent(self, num_bytes: int) -> None:
        """A response of this size was sent."""
        if num_bytes < LARGE_BYTES or not CAN_TRIM:
            return
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(_DELAY, self._run)
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        with self._lock:
            self._is_due = False
        trim_heap()
