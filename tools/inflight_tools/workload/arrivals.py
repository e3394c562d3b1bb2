"""Arrival times of an open loop, from seeded random processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from inflight_tools.workload.errors import WorkloadError

__all__ = ["PROCESSES", "arrival_times"]

PROCESSES = ("poisson", "gamma", "constant")


def arrival_times(process: str, rate: float, seed: int, cv: float = 2.0, burst: int = 1) -> Iterator[float]:
    """Endless, non-decreasing arrival times in seconds after the start.

    Args:
        process: "poisson" (exponential gaps), "gamma" (gaps with the coefficient of variation `cv`;
            1 equals Poisson, larger values are burstier) or "constant".
        rate: mean requests per second.
        seed: the same seed gives the same times.
        cv: standard deviation of a gap over its mean, for "gamma".
        burst: requests that arrive together; gaps grow accordingly, so `rate` remains the mean.

    Raises:
        WorkloadError: an unknown process, or a rate, cv or burst that is not positive.
    """
    if process not in PROCESSES:
        raise WorkloadError(f"arrivals {process!r}: must be closed, {', '.join(PROCESSES)} or trace")
    if not (rate > 0 and cv > 0 and burst > 0):
        raise WorkloadError(f"rate {rate:g}, cv {cv:g}, burst {burst}: all must be above 0")
    return _times(process, burst / rate, seed, cv, burst)


def _times(process: str, gap: float, seed: int, cv: float, burst: int) -> Iterator[float]:
    rng = np.random.default_rng([seed, 0xA221])
    now = 0.0
    while True:
        for _ in range(burst):
            yield now
        if process == "poisson":
            now += float(rng.exponential(gap))
        elif process == "gamma":  # shape 1 / cv^2 and scale gap * cv^2 give this mean and cv
            now += float(rng.gamma(1 / cv**2, gap * cv**2))
        else:
            now += gap
