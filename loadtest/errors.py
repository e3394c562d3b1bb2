"""What stops a load test before any load starts."""

from __future__ import annotations

from inflight_tools.workload.errors import WorkloadError

__all__ = ["LoadTestError"]


class LoadTestError(WorkloadError):
    """No load can be run: one line that says what came and what to do.  Ends the program with status 2."""
