"""What stops a load before it starts."""

from __future__ import annotations

__all__ = ["WorkloadError"]


class WorkloadError(ValueError):
    """Wrong input: one line that says what came and what to do.  Ends a command with status 2."""
