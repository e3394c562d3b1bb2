"""The service level objective that load test and simulator judge requests by."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SLO"]


@dataclass(frozen=True)
class SLO:
    """The limits of a good request, and the share of requests that must be good.

    Attributes:
        ttft: seconds to the first token, at most.
        tpot: mean seconds of each further token, at most.
        attainment: share of the requests that must meet all; the load test only reports the share.
        itl: seconds between two of its tokens, at most.
    """

    ttft: float = 2.0
    tpot: float = 0.25
    attainment: float = 0.9
    itl: float = math.inf

    def met(self, ttft: float | None, tpot: float | None, longest_gap: float = 0.0) -> bool:
        """Whether a request was good; None for `ttft` if it failed, for `tpot` if it has no further token."""
        return (
            ttft is not None and ttft <= self.ttft and (tpot is None or tpot <= self.tpot) and longest_gap <= self.itl
        )
