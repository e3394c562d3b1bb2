"""The service level objective that load test and simulator judge requests by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SLO"]


@dataclass(frozen=True)
class SLO:
    """The limits of a good request, and the share of requests that must be good.

    Attributes:
        ttft: seconds to the first token, at most.
        tpot: mean seconds of each further token, at most.
        attainment: share of the requests that must meet both; the load test only reports the share.
    """

    ttft: float = 2.0
    tpot: float = 0.25
    attainment: float = 0.9

    def met(self, ttft: float | None, tpot: float | None) -> bool:
        """Whether a request was good; None for `ttft` if it failed, for `tpot` if it has no further token."""
        return ttft is not None and ttft <= self.ttft and (tpot is None or tpot <= self.tpot)
