"""The options of a load: its requests and when they are due."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight_tools.workload.arrivals import arrival_times
from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.scenarios import Job, Scenario, find_scenario
from inflight_tools.workload.traces import TrafficTrace, read_trace

__all__ = ["Load"]


@dataclass(frozen=True)
class Load:
    """The requests of a load.

    Attributes:
        scenario: name of a scenario; ignored if `trace` is given.
        trace: CSV or JSONL file to replay instead.
        speed: factor by which the trace's arrivals are sped up.
        seed: determines lengths, prompts and arrivals.
        requests: number of requests; 0 uses the scenario's, -1 is endless.
        arrivals: "closed", "poisson", "gamma", "constant", "trace", or "" for the scenario's.
        rate: requests per second of an open loop; 0 uses the scenario's.
        cv: coefficient of variation of the gaps of "gamma".
        context: tokens to scale the scenario to; 0 leaves it unscaled.
    """

    scenario: str = "lognormal"
    trace: str = ""
    speed: float = 1.0
    seed: int = 1
    requests: int = 0
    arrivals: str = ""
    rate: float = 0.0
    cv: float = 2.0
    context: int = 0

    def load(self) -> Scenario | TrafficTrace:
        """The scenario or trace, scaled.

        Raises:
            WorkloadError: an invalid option.
        """
        if self.trace:
            source: Scenario | TrafficTrace = read_trace(Path(self.trace), max(self.requests, 0) or None).at_speed(
                self.speed
            )
        else:
            source = find_scenario(self.scenario)
        return source.scaled(self.context) if self.context else source

    def process(self) -> str:
        """The arrival process of this load."""
        if self.trace:
            return self.arrivals or "trace"
        if self.arrivals == "trace":
            raise WorkloadError("arrivals trace: no trace given; give one with --trace")
        return self.arrivals or find_scenario(self.scenario).arrivals

    def jobs(self) -> Iterator[Job]:
        """The requests in order, with their arrival times in an open loop.

        Raises:
            WorkloadError: as `load` and `arrival_times`.
        """
        source, process = self.load(), self.process()
        if isinstance(source, TrafficTrace):
            count: int | None = len(source.jobs)
            rate, burst = self.rate or 1.0, 1
        else:
            count = None if self.requests < 0 else self.requests or source.requests
            rate, burst = self.rate or source.rate, source.burst
        numbers: Iterator[int] = itertools.count() if count is None else iter(range(count))
        jobs = (source.job(number, self.seed) for number in numbers)
        if process == "trace":
            return jobs
        if process == "closed":
            return (dataclasses.replace(job, due=None) for job in jobs)
        times = arrival_times(process, rate, self.seed, self.cv, burst)
        return (dataclasses.replace(job, due=at) for job, at in zip(jobs, times))
