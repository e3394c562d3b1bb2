"""The error that stops a load test."""

from __future__ import annotations

from inflight_tools.workload.errors import WorkloadError

__all__ = ["LoadTestError"]


class LoadTestError(WorkloadError):
    """The load test cannot run; the message is one line with the fix.  Exit status 2."""
