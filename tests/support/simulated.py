"""Simulations with known costs and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from inflight.config import EngineConfig
from inflight.engine.integrity import check_core
from inflight.engine.policies.cost_model import StepCost
from inflight_tools.simulator.engine import SimulatedEngine, SimulatedInfo
from inflight_tools.simulator.incidents import Incidents
from inflight_tools.simulator.outcome import Outcome
from inflight_tools.simulator.profile import FitError, Profile
from inflight_tools.simulator.router import RoundRobin, Router
from inflight_tools.simulator.simulation import Simulation
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job

ONE_SECOND = StepCost.linear(fixed=1.0)
PROFILE = Profile(
    name="made-up",
    date="2026-01-01",
    machine="none",
    versions={},
    checkpoint="none",
    options={"block_size": 16, "max_num_seqs": 8, "dtype": "float32"},
    max_model_len=2048,
    vocab_size=100,
    num_blocks=512,
    bytes_per_block=1024,
    device=StepCost(
        tokens=(1, 1001),
        seconds_at=(0.010, 0.110),
        per_sequence=5e-4,
        per_context_token=1e-7,
        per_attention_pair=1e-8,
    ),
    host=StepCost.linear(0.001),
    fit=FitError(batches=1, mean=0.0, worst=0.0),
)


def engine(
    device: StepCost = ONE_SECOND, host: StepCost | None = None, accepted_drafts: float | None = None, **options: Any
) -> SimulatedEngine:
    config = EngineConfig.from_dict({"model": "none", "enable_prefix_caching": False, **options})
    return SimulatedEngine(config, SimulatedInfo(4096, 100, 4096), device, host or StepCost(), accepted_drafts)


def job(index: int, prompt: int, output: int, due: float | None = None, **fields: Any) -> Job:
    return Job(index, "test", prompt, output, due, **fields)


def simulate(
    replicas: list[SimulatedEngine],
    jobs: Iterable[Job],
    router: Router | None = None,
    users: int = 1000,
    incidents: Incidents | None = None,
    successor: Callable[[], SimulatedEngine] = engine,
    scrape_interval: float = 0.0,
) -> Outcome:
    simulation = Simulation(
        replicas, router or RoundRobin(), iter(jobs), IdPrompts(100, 1), users, incidents, successor, scrape_interval
    )
    outcome = simulation.run()
    for replica in outcome.replicas:
        check_core(replica)
    return outcome
