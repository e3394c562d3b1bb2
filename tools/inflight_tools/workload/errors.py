"""The error that stops a load before it starts."""

from __future__ import annotations

__all__ = ["WorkloadError"]


class WorkloadError(ValueError):
    """Wrong input; the message is one line with the fix.  Exit status 2."""
