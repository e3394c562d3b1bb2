#!/usr/bin/env python3
"""The value of routing: fleets of 8 to 512 replicas on the simulator's clock.

    python bench/fleet_simulated.py [--resume]

Routers under the same requests at the same times, on replicas of the profile `llama-60m-cpu` with a KV pool of 65,536
tokens: prompts that share prefixes, and the ramp of month-end without any; undisturbed, with an eighth of the
replicas killed at once, and with all of them restarted.  The first half of an undisturbed run fills the caches and does
not count.  Virtual time depends on nothing that the machine does: the figures repeat exactly.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from fleet_picture import draw

from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.incidents import Incidents, Kill, Rollout
from inflight_tools.simulator.outcome import Outcome, Served
from inflight_tools.simulator.profile import find_profile
from inflight_tools.simulator.router import LeastLoaded, LeastWaiting, PrefixAffinity, RoundRobin, Router
from inflight_tools.simulator.simulation import Simulation
from inflight_tools.workload.arrivals import arrival_times
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job, Scenario, SharedPrefixes, find_scenario
from inflight_tools.workload.slo import SLO

PROFILE = find_profile("llama-60m-cpu")
OPTIONS = {"num_gpu_blocks_override": 4096, "max_queue_size": 100_000}
SLO_ = SLO(ttft=1.0, tpot=0.05, attainment=0.95)
SEED = 1
ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-waiting": LeastWaiting,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}
SIZES = (8, 32, 128, 512)
REQUESTS = 48  # per replica
RATES = {"prefix-heavy": 3.0, "month-end": 8.0}  # requests per second and replica; month-end's at the peak
PREFIXES = 16  # per replica
SCRAPE = 0.05  # seconds; the default of the Gateway API Inference Extension's endpoint picker


@dataclass(frozen=True)
class Cell:
    """One simulation; what is not named is the default of the study."""

    scenario: str = "prefix-heavy"
    replicas: int = 32
    router: str = "round-robin"
    rate: float = 0.0
    incident: str = ""
    scrape: float = SCRAPE
    load_factor: float = 1.25
    prefixes: float = PREFIXES
    blocks: int = 2
    requests: int = REQUESTS


def study() -> Iterator[tuple[str, Cell]]:
    """Parts of the study and their cells; the largest fleets last."""
    compared = ("round-robin", "least-waiting", "prefix-affinity")
    yield from sizes(8, 32)
    yield from incidents(8)
    for scenario, rates in (("prefix-heavy", (1, 2, 3, 4, 6)), ("month-end", (4, 6, 8, 10))):
        for rate in rates:
            for router in compared:
                yield "load", Cell(scenario, 16, router=router, rate=float(rate))
    for prefixes in (0.125, 1, 4, 64):
        for router in ("least-loaded", "prefix-affinity"):
            yield "prefixes", Cell(replicas=16, router=router, prefixes=prefixes)
    for prefixes in (0.125, PREFIXES):
        for load_factor in (1.0, 1.1, 1.25, 2.0, 1000.0):
            yield "load factor", Cell(replicas=16, router="prefix-affinity", load_factor=load_factor, prefixes=prefixes)
    for replicas in (8, 64):
        for scrape in (0.0, 0.05, 0.2, 1.0):
            yield "scrape", Cell("month-end", replicas, "least-waiting", scrape=scrape)
    yield from sizes(128)
    yield from incidents(64)
    yield from sizes(512)


def sizes(*numbers: int) -> Iterator[tuple[str, Cell]]:
    """All routers at these numbers of replicas."""
    for replicas in numbers:
        for scenario in RATES:
            for router in ROUTERS:
                yield "size", Cell(scenario, replicas, router)


def incidents(replicas: int) -> Iterator[tuple[str, Cell]]:
    """Failures and rollouts."""
    for incident in ("kill", "rollout"):
        for scenario in RATES:
            for router in ROUTERS:
                yield "incident", Cell(scenario, replicas, router, incident=incident)


def jobs_of(cell: Cell) -> list[Job]:
    """The requests; the same for every router."""
    scenario = find_scenario(cell.scenario)
    count, rate = cell.requests * cell.replicas, (cell.rate or RATES[cell.scenario]) * cell.replicas
    if scenario.prefixes:
        number = max(1, round(cell.prefixes * cell.replicas))
        scenario = replace(scenario, prefixes=SharedPrefixes(number, cell.blocks))
        times: Iterator[float] = arrival_times("poisson", rate, SEED)
    else:
        times = ramped(scenario, count, rate)
    return [replace(scenario.job(index, SEED), due=due) for index, due in zip(range(count), times)]


def ramped(scenario: Scenario, count: int, peak: float) -> Iterator[float]:
    """Arrivals of a Poisson process whose rate follows the scenario's ramp, as long as `count` requests take."""
    shape = np.array(scenario.ramp)
    knots = np.cumsum([0.0, *shape * (count / peak / float(shape @ (0.5, 1.0, 0.5)))])
    grid = np.linspace(0.0, knots[-1], 4096)
    rates = np.interp(grid, knots, (0.0, peak, peak, 0.0))
    expected = np.cumsum([0.0, *(rates[1:] + rates[:-1]) / 2 * np.diff(grid)])
    unit = arrival_times("poisson", 1.0, SEED)
    return iter(np.interp([next(unit) for _ in range(count)], expected, grid).tolist())


def incidents_of(cell: Cell, last_due: float) -> Incidents:
    """An eighth of the replicas dies a third into the run; or all are restarted, a quarter at a time."""
    if cell.incident == "kill":
        dead = range(0, cell.replicas, 8)
        return Incidents(tuple(Kill(last_due / 3, replica) for replica in dead), startup=5.0)
    if cell.incident == "rollout":
        return Incidents(rollout=Rollout(last_due / 5, cell.replicas // 4, grace=2.0), startup=1.0)
    return Incidents()


def router_of(cell: Cell) -> Router:
    if cell.router == "prefix-affinity":
        return PrefixAffinity(load_factor=cell.load_factor)
    return ROUTERS[cell.router]()


def run(cell: Cell) -> dict[str, Any]:
    """The figures of a cell."""
    start, jobs = time.monotonic(), jobs_of(cell)
    config = PROFILE.config(OPTIONS)
    last_due = jobs[-1].due or 0.0

    def make() -> SimulatedEngine:
        return SimulatedEngine.of(config, PROFILE)

    outcome = Simulation(
        [make() for _ in range(cell.replicas)],
        router_of(cell),
        iter(jobs),
        IdPrompts(PROFILE.vocab_size, SEED),
        incidents=incidents_of(cell, last_due),
        successor=make,
        scrape_interval=cell.scrape,
    ).run()
    warm = [request for request in outcome.requests if cell.incident or request.arrival >= last_due / 2]
    figures = {**seen(warm), "gap_p99": quantile(outcome.gaps, 99), "gap_max": max(outcome.gaps)}
    if cell.incident:
        figures |= of_incident(outcome)
    figures["busy_spread"] = spread(outcome, cell.replicas)
    return {**figures, "wall_seconds": time.monotonic() - start}


def seen(requests: list[Served]) -> dict[str, float]:
    """Latencies and attainment of these requests; every one must have been answered."""
    assert all(request.error is None for request in requests)
    ttft = [request.ttft for request in requests]
    good = sum(SLO_.met(request.ttft, request.tpot) for request in requests)
    latency = [request.last - request.arrival for request in requests]
    return {
        "measured": len(requests),
        "attainment": good / len(requests) if requests else 0.0,
        **{f"ttft_p{q}": quantile(ttft, q) for q in (50, 99)},
        **{f"tpot_p{q}": quantile([r.tpot for r in requests if r.tpot is not None], q) for q in (50, 99)},
        **{f"latency_p{q}": quantile(latency, q) for q in (50, 99)},
        "prefix_hits": sum(r.cached for r in requests) / max(1, sum(r.job.prompt_tokens for r in requests)),
    }


def of_incident(outcome: Outcome) -> dict[str, Any]:
    """During and outside of the incident."""
    end = max(request.last for request in outcome.requests)
    windows = [(start, min(stop, end)) for start, stop in outcome.windows]
    during = [r for r in outcome.requests if any(r.arrival <= stop and r.last >= start for start, stop in windows)]
    inside = {id(request) for request in during}
    disturbed = np.array(outcome.disturbed).astype(bool)
    gaps = np.array(outcome.gaps)
    return {
        "resumed": sum(request.resumed > 0 for request in outcome.requests),
        "recomputed_tokens": sum(request.recomputed for request in outcome.requests),
        "seconds": sum(stop - start for start, stop in windows),
        "during": {**seen(during), "gap_p99": quantile(gaps[disturbed], 99)},
        "outside": {
            **seen([r for r in outcome.requests if id(r) not in inside]),
            "gap_p99": quantile(gaps[~disturbed], 99),
        },
    }


def spread(outcome: Outcome, replicas: int) -> float:
    """Imbalance: the busiest replica's requests over the mean."""
    counts = np.bincount([request.replica for request in outcome.requests], minlength=replicas)
    return float(counts.max() / counts.mean())


def quantile(values: Any, q: int) -> float:
    found = np.array(values, float)
    return float(np.percentile(found, q)) if len(found) else 0.0


def main() -> None:
    args = common.options(
        __doc__,
        output=dict(type=Path, default=common.HERE / "results" / "fleet-simulated.json"),
        picture=dict(type=Path, default=common.ROOT / "docs" / "images" / "fleet-simulated.png"),
        resume=dict(action="store_true", help="keep the cells that are recorded, and run the others"),
    )
    rows = json.loads(args.output.read_text())["cells"] if args.resume and args.output.exists() else []
    known = {(row["part"], *(row[name] for name in vars(Cell()))) for row in rows}
    for part, cell in study():
        if (part, *vars(cell).values()) in known:
            continue
        figures = run(cell)
        rows.append({"part": part, **vars(cell), **figures})
        print(
            f"{part:<12} {cell.scenario:<13} {cell.replicas:>4} {cell.router:<16} {cell.incident:<8} "
            f"{100 * figures['attainment']:5.1f}% good, TTFT p50 {figures['ttft_p50']:.3f} "
            f"p99 {figures['ttft_p99']:.3f} s, {100 * figures['prefix_hits']:.0f}% cached, "
            f"{figures['wall_seconds']:.1f} s",
            flush=True,
        )
        args.output.write_text(json.dumps(described(rows), indent=1) + "\n")
        gc.collect()
    draw(described(rows), args.picture)
    print(f"wrote {args.output} and {args.picture}")


def described(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The record: the cells, and what all of them have in common."""
    return {
        "profile": PROFILE.name,
        "machine": PROFILE.machine,
        "options": OPTIONS,
        "slo": {"ttft": SLO_.ttft, "tpot": SLO_.tpot, "attainment": SLO_.attainment},
        "rates": RATES,
        "cells": rows,
    }


if __name__ == "__main__":
    main()
