"""Validates the simulator: the same load through the real and the simulated engine."""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec

from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.profile import Profile
from inflight_tools.simulator.report import Percentiles
from inflight_tools.simulator.router import RoundRobin
from inflight_tools.simulator.simulation import Simulation
from inflight_tools.workload.load import Load
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job

__all__ = ["Run", "compare", "run_real", "run_simulated"]

_WARM_UP = 4  # requests before the clock starts


class Run(msgspec.Struct, frozen=True):
    """One side of the comparison; times in seconds."""

    tokens: int
    seconds: float
    ttft: Percentiles
    itl: Percentiles

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def compare(core: EngineCore, profile: Profile, load: Load, users: int) -> tuple[Run, Run]:
    """(predicted, measured) for a closed loop of `users`: on a simulation of `core`, and on `core` itself."""
    return run_simulated(core, profile, load, users), run_real(core, load, users)


def run_simulated(core: EngineCore, profile: Profile, load: Load, users: int) -> Run:
    """The load on a simulation of `core`."""
    config = msgspec.structs.replace(core.config, num_gpu_blocks_override=core.info.num_blocks)
    engine = SimulatedEngine.of(config, profile)
    prompts = IdPrompts(core.info.vocab_size, load.seed)
    outcome = Simulation([engine], RoundRobin(), load.jobs(), prompts, users).run()
    ttft = Percentiles.of(ttft for request in outcome.requests if (ttft := request.ttft) is not None)
    tokens = sum(request.tokens for request in outcome.requests)
    return Run(tokens, outcome.seconds, ttft, Percentiles.of(outcome.gaps))


def run_real(core: EngineCore, load: Load, users: int) -> Run:
    """The load on `core` itself, at full speed, without text or server."""
    prompts = IdPrompts(core.info.vocab_size, load.seed)
    warm_up = [Job(-1 - k, "warm-up", 16, 4) for k in range(_WARM_UP)]
    _Loop(core, [(job, prompts.make(Job(1_000_000 + k, "warm-up", 16, 4))) for k, job in enumerate(warm_up)], 4).run()
    return _Loop(core, [(job, prompts.make(job)) for job in load.jobs()], users).run()


class _Loop:
    """A closed loop: a user whose request ends sends the next one."""

    def __init__(self, core: EngineCore, work: list[tuple[Job, list[int]]], users: int) -> None:
        self._core, self._work, self._users = core, work[::-1], users
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._gaps: array[float] = array("d")
        self._ttft: list[float] = []

    def run(self) -> Run:
        start = now = time.monotonic()
        for _ in range(self._users):
            self._send(now)
        tokens = 0
        while self._core.has_work:
            deltas: list[Any] = self._core.step().deltas
            now = time.monotonic()
            for delta in deltas:
                tokens += 1
                last = self._last.get(delta.request_id)
                if last is None:
                    self._ttft.append(now - self._sent[delta.request_id])
                else:
                    self._gaps.append(now - last)
                self._last[delta.request_id] = now
                if delta.finish_reason is not None:
                    self._send(now)
        return Run(tokens, now - start, Percentiles.of(self._ttft), Percentiles.of(self._gaps))

    def _send(self, now: float) -> None:
        if not self._work:
            return
        job, prompt = self._work.pop()
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True, seed=0)
        failure = self._core.add_request(AddRequest(job.index, prompt, params))
        if failure is not None:
            raise ValueError(f"the engine rejects request {job.index}: {failure.message}")
        self._sent[job.index] = now
