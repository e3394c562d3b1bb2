"""The number of replicas that a load needs: a search over simulations, and the thresholds of the autoscaler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from inflight_tools.simulator.incidents import Incidents, Kill
from inflight_tools.simulator.report import Report, summarise
from inflight_tools.simulator.scene import Scene
from inflight_tools.simulator.sweep import Trial, highest_rate
from inflight_tools.workload.slo import SLO

__all__ = ["MAX_REPLICAS", "Size", "fewest", "find_size"]

MAX_REPLICAS = 2048
_IDLE = 0.05  # a fleet that is busy for less of the time gains nothing from more replicas


@dataclass(frozen=True)
class Size:
    """An answer to "how many replicas for this load and SLO".

    Attributes:
        replicas: at least `needed` plus `survive`; that many meet the SLO with `survive` of them lost in the middle of
            the load.
        needed: that many meet it if none is lost.
        minimum, maximum: the same as `replicas` at half and at twice the load.
        report: of the load on `replicas`, none of them lost.
        edge: highest multiple of the load at which `needed` replicas meet the SLO.
        at_edge: the report of that load.
    """

    replicas: int
    needed: int
    minimum: int
    maximum: int
    survive: int
    report: Report
    edge: float
    at_edge: Report

    @property
    def waiting_per_replica(self) -> int:
        """Threshold for the mean number of waiting requests of a replica."""
        return max(1, math.floor(self.at_edge.waiting))

    @property
    def kv_cache_usage(self) -> float:
        """Threshold for the mean share of KV blocks in use, in hundredths."""
        return min(0.95, max(0.01, math.floor(100 * self.at_edge.kv_cache_usage) / 100))


def find_size(scene: Scene, slo: SLO, survive: int = 0, tell: Callable[[str], None] = lambda line: None) -> Size | None:
    """The fewest replicas that meet the SLO; None if no number does.

    Args:
        scene: the load; its number of replicas and its incidents do not count.
        survive: replicas whose loss the SLO must survive, for the requests that are open then or come later.
        tell: called with a line per simulation.
    """
    scene = dataclasses.replace(scene, incidents=Incidents())

    def run(factor: float, replicas: int, lost: int = 0) -> Report:
        chosen = dataclasses.replace(scene.at_load(factor), replicas=replicas)
        if lost:
            half = plain(factor, replicas).seconds / 2
            kills = tuple(Kill(half, replica) for replica in range(lost))
            chosen = dataclasses.replace(chosen, incidents=Incidents(kills, startup=math.inf))
        report = summarise(chosen.run(), slo)
        without = f", {lost} lost" if lost else ""
        tell(f"{replicas} replicas{without}, {factor:g} x the load: {100 * _attained(report):.1f}% good")
        return report

    @cache
    def plain(factor: float, replicas: int) -> Report:
        return run(factor, replicas)

    @cache
    def with_losses(factor: float, replicas: int) -> Report:
        return run(factor, replicas, survive)

    def search(factor: float, start: int) -> tuple[int, int] | None:
        """Replicas needed at this multiple of the load: without losses, and with them."""
        needed = fewest(lambda count: plain(factor, count), slo, start)
        if needed is None or not survive:
            return None if needed is None else (needed, needed)
        spare = needed + survive
        replicas = fewest(lambda count: with_losses(factor, count), slo, spare, spare - 1)
        return None if replicas is None else (needed, replicas)

    found = search(1.0, max(1, scene.replicas))
    if found is None:
        return None
    needed, replicas = found
    half, twice = search(0.5, -(-needed // 2)), search(2.0, 2 * needed)
    edge = highest_rate(lambda factor: Trial({}, plain(factor, needed), factor), 1.0, slo)
    return Size(
        replicas,
        needed,
        half[1] if half else replicas,
        twice[1] if twice else 2 * replicas,
        survive,
        plain(1.0, replicas),
        edge.rate,
        edge.report,
    )


def fewest(
    attempt: Callable[[int], Report], slo: SLO, start: int, too_few: int = 0, limit: int = MAX_REPLICAS
) -> int | None:
    """The smallest count that meets the SLO, by doubling and bisection; None if none up to `limit` does.

    More replicas never hurt, except by chance where few requests decide.  So the next larger count must meet the SLO,
    too; if it does not, the search goes on upwards until two neighbours do.

    Args:
        attempt: simulates a count; cheap when asked again.
        start: the first count to try.
        too_few: a count that is known to miss the SLO.
    """

    def meets(count: int) -> bool:
        return _attained(attempt(count)) >= slo.attainment

    low, high = too_few, max(start, too_few + 1)
    while not meets(high):
        if high >= limit or (low > too_few and _hopeless(attempt(low), attempt(high))):
            return None
        low, high = high, min(limit, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    while not (meets(high) and (high >= limit or meets(high + 1))):
        high += 1
        if high > limit:
            return None
    return high


def _attained(report: Report) -> float:
    """The share of good requests, from the loss of a replica on if there is one."""
    return report.attainment if report.incident is None else report.incident.during.attainment


def _hopeless(fewer: Report, more: Report) -> bool:
    """Whether more replicas make no difference."""
    return more.busy < _IDLE and _attained(more) <= _attained(fewer)
