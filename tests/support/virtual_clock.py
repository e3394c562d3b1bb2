"""The real core on a virtual clock: a step takes one second, and tokens cost nothing to compute."""

from __future__ import annotations

import time
from typing import Any

from engine_rig import Info
from slots import SeenStep, SlotOwners

from inflight.config import EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.deltas import RequestFailed
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.request import Request, Status
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput


class RecordingRunner:
    """Samples token 1 for every row that samples, and records the steps."""

    draft_runner = None
    num_collected_first = 0

    def __init__(self, info: Info) -> None:
        self.info = info
        self.steps: list[SchedulerOutput] = []

    def launch(self, out: SchedulerOutput) -> StepOutput:
        return self.execute(out, None)

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        self.steps.append(out)
        now = time.monotonic()
        return StepOutput([1 if samples else -1 for samples in out.samples], started=now, ended=now)

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket


class Clocked:
    """An engine core whose requests arrive at `now`.

    Attributes:
        requests: every request's first sequence, by id.
        started: step in which a request was first scheduled, by id; `first_token` likewise.
    """

    def __init__(self, num_blocks: int = 64, **options: Any) -> None:
        config = EngineConfig.from_dict({"model": "none", "block_size": 4, "enable_prefix_caching": False, **options})
        self.runner = RecordingRunner(Info(num_blocks=num_blocks))
        self.now = 0
        self.core = make_core(config, self.runner, clock=lambda: 0.0)  # deadlines determine an order, and never pass
        self.scheduler = self.core.scheduler
        self.requests: dict[int, Request] = {}
        self.sequences: dict[tuple[int, int], Request] = {}
        self._slots = SlotOwners()
        self.started: dict[int, int] = {}
        self.first_token: dict[int, int] = {}

    def try_add(self, prompt: int, output: int, *, timeout: float | None = None, **fields: Any) -> RequestFailed | None:
        """A request of `prompt` tokens that yields `output`, unless token 1 ends it (`stop`)."""
        number = len(self.requests)
        stops = [1] if fields.pop("stop", False) else []
        params = SamplingParams(max_tokens=output, seed=0, stop_token_ids=stops, n=fields.pop("n", 1))
        deadline = None if timeout is None else self.now + timeout
        message = AddRequest(number, [2] * prompt, params, deadline=deadline, arrival=float(self.now), **fields)
        failure = self.core.add_request(message)
        if failure is None:
            sequences = self.core._live[number]
            self.requests[number] = sequences[0]
            self.sequences.update({(number, index): request for index, request in enumerate(sequences)})
        return failure

    def add(self, prompt: int, output: int, **fields: Any) -> Request:
        failure = self.try_add(prompt, output, **fields)
        assert failure is None, failure
        return self.requests[len(self.requests) - 1]

    def step(self) -> SeenStep:
        """Run one step and check the invariants."""
        count = len(self.runner.steps)
        self.core.step()
        check_core(self.core)
        out = SeenStep()
        for step in self.runner.steps[count:]:  # two when launch-ahead starts
            out = self._slots.see(step)
        out.requests = [self.sequences[key] for key in out.requests]
        out.preempted = [self.sequences[key] for key in out.preempted]
        for request, samples in zip(out.requests, out.samples):
            self.started.setdefault(request.request_id, self.now)
            if samples:
                self.first_token.setdefault(request.request_id, self.now)
        self.now += 1
        return out

    def run(self, limit: int = 5000) -> None:
        """Step until no work is left."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def order(self) -> list[int]:
        """Ids in the order in which they were first scheduled."""
        return sorted(self.started, key=self.started.__getitem__)

    @property
    def waiting(self) -> list[Request]:
        return list(self.scheduler.waiting)

    @property
    def all_finished(self) -> bool:
        return all(request.status is Status.FINISHED for request in self.requests.values())
