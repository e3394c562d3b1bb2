"""Memory that was freed, returned to the system.  No torch."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["CAN_TRIM", "LaterTrim", "trim_heap"]

_DELAY = 1.0  # seconds: by then what was used is gone, and one trim serves several
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; other C libraries are left alone
CAN_TRIM = _malloc_trim is not None


def trim_heap() -> None:
    """Have glibc return free pages, also those between memory that is in use.  Without Python's lock."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class LaterTrim:
    """Has glibc return free pages a second after `ask`, in a thread of its own: other threads wait for memory then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False

    def ask(self) -> None:
        with self._lock:
            if self._is_due or not CAN_TRIM:
                return
            self._is_due = True
        timer = threading.Timer(_DELAY, self._run)
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        with self._lock:
            self._is_due = False
        trim_heap()
