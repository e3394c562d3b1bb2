"""Memory that was freed, returned to the system.  No torch."""

from __future__ import annotations

import ctypes

__all__ = ["CAN_TRIM", "trim_heap"]

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; other C libraries are left alone
CAN_TRIM = _malloc_trim is not None


def trim_heap() -> None:
    """Have glibc return free pages, also those between memory that is in use.  Without Python's lock."""
    if _malloc_trim is not None:
        _malloc_trim(0)
