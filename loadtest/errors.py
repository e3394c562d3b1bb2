"""What stops a load test before any load starts."""

from __future__ import annotations

__all__ = ["LoadTestError"]


class LoadTestError(ValueError):
    """Wrong input: one line that says what came and what to do.  Ends the program with status 2."""
