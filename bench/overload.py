#!/usr/bin/env python3
"""Goodput under more load than the engine can serve, with and without shedding, on a virtual clock.

    python bench/overload.py [--seconds 300] [--seed 1] [--output FILE]

The real core, scheduler and policies; only the device is simulated, with the step costs of the shipped profile
`llama-60m-cpu`.  Requests arrive at random (Poisson) with prompts of 16..256 tokens, outputs lognormal(4.0, 0.8) that
only `max_tokens` = 1000 bounds, and a timeout of 10 s, at which their clients give up.  *Good* is a request that ended
within its timeout.  Capacity is the rate at which an engine that always has enough to do ends requests.

Of the requests that would be shed, one in twenty is admitted: the share that then misses its deadline says how often
shedding is right (`precision`).  `recall` is the share of the requests without a chance that were shed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import common

from inflight.engine.deltas import RequestFailed
from inflight.engine.messages import AddRequest
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight_tools.simulator.engine import SimulatedDevice, SimulatedEngine, SimulatedInfo
from inflight_tools.simulator.profile import find_profile

_EOS, _TOKEN = 0, 1
_MAX_TOKENS = 1000
_PROBES = 0.05  # of the requests that would be shed
PROFILE = "llama-60m-cpu"
TIMES = (0.5, 1.0, 1.2, 2.0, 4.0)  # offered load, in capacities
ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"scheduling_policy": "priority", "priority_aging_seconds": 5.0},
    "sjf": {"scheduling_policy": "sjf"},
    "edf": {"scheduling_policy": "edf"},
    "fair queue": {"tenants": {"gold": {"weight": 4}, "*": {}}},
}


@dataclass
class Job:
    """A request; times are virtual seconds.

    Attributes:
        length: output tokens after which it ends.
        ending: "good", "late" (given up at its deadline), "shed" or "full" (refused).
        probe: it would have been shed.
    """

    arrival: float
    prompt_tokens: int
    length: int
    timeout: float
    tenant: str
    priority: int
    ending: str = ""
    probe: bool = False


class _Device(SimulatedDevice):
    """Ends each request at its length, which the scheduler does not know."""

    def __init__(self, info: SimulatedInfo, like: SimulatedDevice, jobs: list[Job]) -> None:
        super().__init__(info, like._device, like._host)
        self._jobs = jobs
        self._left: dict[int, int] = {}  # by slot: tokens until its request ends
        self._slots: list[list[int]] = []

    def launch(self, out: SchedulerOutput) -> Any:
        for row in out.new_rows:
            given = len(row.token_ids) // 4 - row.num_prompt_tokens
            self._left[row.slot] = self._jobs[row.request_id].length - given
        self._slots.append(out.slots)
        return super().launch(out)

    def collect(self, ticket: Any) -> StepOutput:
        step = super().collect(ticket)
        for row, slot in enumerate(self._slots.pop(0)):
            if step.token_ids[row] == _TOKEN:
                self._left[slot] -= 1
                step.token_ids[row] = _TOKEN if self._left[slot] else _EOS
        return step


class _Engine(SimulatedEngine):
    """An engine whose arrivals are sometimes let in although they would be shed."""

    def __init__(self, jobs: list[Job], options: dict[str, Any], seed: int) -> None:
        profile = find_profile(PROFILE)
        like = SimulatedEngine.of(profile.config(options), profile)
        like.info.eos_token_ids = [_EOS]  # type: ignore[attr-defined]
        super().__init__(profile.config(options), like.info, profile.device, profile.host)  # type: ignore[arg-type]
        self.device = self.runner = _Device(like.info, self.device, jobs)  # type: ignore[arg-type]
        self._jobs, self._random, self._judge = jobs, random.Random(seed), self.shedding.refusal
        self.shedding.refusal = self._refusal  # type: ignore[method-assign]

    def _refusal(self, sequences: list[Request], failure: RequestFailed | None) -> RequestFailed | None:
        found = self._judge(sequences, failure)
        if found is not None and found.shed and self._random.random() < _PROBES:
            self._jobs[found.request_id].probe = True
            return None
        return found


def make_jobs(rate: float, seconds: float, seed: int, timeout: float | None = 10.0) -> list[Job]:
    """A load of `rate` requests a second; without a timeout, no client gives up.  Under "edf", timeouts vary."""

    def arrivals() -> Iterator[float]:
        now = 0.0
        while (now := now + draw.expovariate(rate)) < seconds:
            yield now

    draw = random.Random(seed)
    return [
        Job(
            now,
            draw.randint(16, 256),
            max(1, min(_MAX_TOKENS, round(draw.lognormvariate(4.0, 0.8)))),
            float("inf") if timeout is None else timeout * draw.choice((0.5, 1.0, 1.5)),
            draw.choice(("gold", "silver", "bronze")),
            draw.choice((0, 1, 2)),
        )
        for now in arrivals()
    ]


def run(jobs: list[Job], options: dict[str, Any], seed: int = 1) -> _Engine:
    """Serve the jobs, which learn their endings."""
    engine, draw = _Engine(jobs, options, seed), random.Random(seed)
    open_jobs: dict[int, Job] = {}
    coming = iter(enumerate(jobs))
    number, job = next(coming, (0, None))
    while job is not None or engine.has_work:
        if job is not None and (job.arrival <= engine.now or not engine.has_work):
            engine.now = max(engine.now, job.arrival)
            prompt = [draw.randint(2, 1000) for _ in range(job.prompt_tokens)]
            params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, seed=0)
            deadline = None if job.timeout == float("inf") else job.arrival + job.timeout
            failure = engine.add_request(
                AddRequest(number, prompt, params, job.priority, job.tenant, deadline, arrival=job.arrival)
            )
            if failure is None:
                open_jobs[number] = job
            else:
                job.ending = "shed" if failure.shed else "full"
            number, job = next(coming, (0, None))
            continue
        for delta in engine.step().deltas:
            if delta.finish_reason is not None:
                open_jobs.pop(delta.request_id).ending = "good"
        for late in [key for key, each in open_jobs.items() if each.arrival + each.timeout <= engine.now]:
            open_jobs.pop(late).ending = "late"
            engine.abort(late)
    return engine


def capacity(options: dict[str, Any], seed: int) -> float:
    """Requests a second that end while there is always enough to do."""
    jobs = make_jobs(1000.0, 1.0, seed, timeout=None)
    engine = run(jobs, {**options, "max_queue_size": 0})
    return len(jobs) / engine.now


def measure(rate: float, seconds: float, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """One load: how its requests ended."""
    jobs = make_jobs(rate, seconds, seed)
    run(jobs, options, seed)
    endings = Counter(job.ending for job in jobs)
    probes = [job for job in jobs if job.probe]
    hopeless = [job for job in jobs if job.ending == "shed" or job.ending == "late"]
    return {
        "requests": len(jobs),
        **{ending: endings[ending] for ending in ("good", "late", "shed", "full")},
        "goodput": round(endings["good"] / seconds, 2),
        "good_tokens_per_second": round(sum(job.length for job in jobs if job.ending == "good") / seconds, 1),
        "precision": round(sum(job.ending == "late" for job in probes) / len(probes), 3) if probes else None,
        "recall": round(endings["shed"] / len(hopeless), 3) if hopeless else None,
    }


def main() -> None:
    seconds = dict(type=float, default=300.0, help="virtual seconds of each load")
    args = common.options(__doc__, seconds=seconds, seed=1, orders=common.choice(ORDERS))
    full = capacity({}, args.seed)
    print(f"capacity {full:.2f} requests/s")
    results: dict[str, Any] = {}
    for order in args.orders:
        for sheds in (True, False):
            options = {**ORDERS[order], "shed_on_predicted_wait": sheds}
            name = f"{order}, {'shedding' if sheds else 'off'}"
            results[name] = {f"{t:g}x": measure(t * full, args.seconds, options, args.seed) for t in TIMES}
            peak = max(found["goodput"] for found in results[name].values())
            for load, found in results[name].items():
                share = found["goodput"] / peak
                print(f"{name:24} {load:>5} goodput {found['goodput']:6.2f} ({share:4.0%} of its peak) {found}")
    common.record(args, results, profile=PROFILE, capacity=round(full, 2))


if __name__ == "__main__":
    main()
