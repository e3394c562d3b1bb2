"""Arrival processes have the requested mean and spread; a seed reproduces them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inflight_tools.workload.arrivals import arrival_times
from inflight_tools.workload.errors import WorkloadError

COUNT = 20_000


def _gaps(process: str, rate: float, cv: float = 2.0, seed: int = 5) -> np.ndarray:
    return np.diff(list(itertools.islice(arrival_times(process, rate, seed, cv), COUNT)))


def test_mean_and_spread() -> None:
    for process, cv in [("poisson", 1.0), ("gamma", 0.5), ("gamma", 1.0), ("gamma", 3.0)]:
        for rate in [0.2, 7.0]:
            gaps = _gaps(process, rate, cv)
            assert (gaps >= 0).all()
            # Four standard errors of the mean; the coefficient of variation varies more.
            assert gaps.mean() == pytest.approx(1 / rate, rel=4 * cv / COUNT**0.5)
            assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_poisson_counts_have_equal_mean_and_variance() -> None:
    times = list(itertools.islice(arrival_times("poisson", 4.0, 1), COUNT))
    counts = np.histogram(times, bins=np.arange(0, times[-1], 5.0))[0]
    assert counts.mean() == pytest.approx(20, rel=0.05)
    assert counts.var() == pytest.approx(20, rel=0.15)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.sort(_gaps("poisson", 1.0))
    share = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(share - (1 - np.exp(-gaps))).max() < 1.63 / len(gaps) ** 0.5  # Kolmogorov-Smirnov at 1%


def test_constant_arrivals_are_equidistant() -> None:
    assert np.allclose(_gaps("constant", 4.0), 0.25)


def test_bursts_keep_the_rate() -> None:
    times = list(itertools.islice(arrival_times("poisson", 10.0, 1, burst=5), COUNT))
    assert times[:5] == [0.0] * 5
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.1)


def test_equal_seeds_give_equal_times_and_others_do_not() -> None:
    assert (_gaps("gamma", 1.0, seed=1) == _gaps("gamma", 1.0, seed=1)).all()
    assert (_gaps("gamma", 1.0, seed=1) != _gaps("gamma", 1.0, seed=2)).any()


def test_values_that_are_not_positive_are_rejected() -> None:
    for values in [("poisson", 0.0, 1.0), ("gamma", 1.0, 0.0), ("gamma", float("nan"), 1.0)]:
        process, rate, cv = values
        with pytest.raises(WorkloadError, match="above 0"):
            arrival_times(process, rate, 1, cv)
