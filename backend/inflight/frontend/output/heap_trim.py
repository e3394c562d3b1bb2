"""Returns memory to the system after large responses.

A response with log probabilities is joined from thousands of small texts.  glibc keeps the memory of freed ones between
others that are still in use, and would keep that of the largest response ever sent.
"""

from __future__ import annotations

from inflight.heap import LaterTrim

__all__ = ["LARGE_BYTES", "HeapTrim"]

LARGE_BYTES = 4 * 2**20


class HeapTrim:
    """Asks glibc to return free pages a second after a large response; other C libraries are left alone."""

    def __init__(self) -> None:
        self._trim = LaterTrim()

    def sent(self, num_bytes: int) -> None:
        """A response of this size was sent."""
        if num_bytes >= LARGE_BYTES:
            self._trim.ask()
