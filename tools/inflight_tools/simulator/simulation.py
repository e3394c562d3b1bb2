"""Sends a load to replicas on a virtual clock and records what its users would have seen."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.router import Router
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job

__all__ = ["Outcome", "Served", "Simulation"]

_NEVER = float("inf")


@dataclass(slots=True)
class Served:
    """A request; times are virtual seconds.

    Attributes:
        replica: index of its engine.
        first, last: arrival of its first and of its latest token.
        error: why it was rejected; None if it was not.
    """

    job: Job
    arrival: float
    replica: int
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to its first token."""
        return None if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None if there is only one."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Outcome:
    """The outcome of a load.

    Attributes:
        requests: in order of arrival.
        gaps: seconds between consecutive tokens of a request, over all requests.
        replicas: the engines in their final state.
        kv_use: per replica, the share of its blocks in use: (mean over the time of its steps, maximum).
    """

    requests: list[Served]
    gaps: array[float]
    replicas: list[SimulatedEngine]
    kv_use: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        ends = [request.last for request in self.requests if request.tokens]
        return max(ends) - self.requests[0].arrival if ends else 0.0


@dataclass(slots=True)
class _KvUse:
    seconds: float = 0.0
    block_seconds: float = 0.0
    peak: int = 0

    def add(self, seconds: float, blocks: int) -> None:
        self.seconds += seconds
        self.block_seconds += seconds * blocks
        self.peak = max(self.peak, blocks)

    def shares(self, num_blocks: int) -> tuple[float, float]:
        mean = self.block_seconds / self.seconds if self.seconds else 0.0
        return mean / num_blocks, self.peak / num_blocks


class Simulation:
    """A discrete-event simulation of a load.

    Requests with a due time arrive at that time (open loop).  Those without arrive whenever one of `users`
    is free (closed loop), the first `users` of them at the start.

    Args:
        replicas: idle engines at time 0.
        router: chooses the replica of a request.  It sees the outcome of a step when the step begins.
        jobs: the load; finite.
        prompts: generates the prompts.
        users: number of users in a closed loop.
    """

    def __init__(
        self, replicas: list[SimulatedEngine], router: Router, jobs: Iterator[Job], prompts: IdPrompts, users: int = 1
    ) -> None:
        self._replicas, self._router, self._jobs, self._prompts = replicas, router, jobs, prompts
        self._requests: list[Served] = []
        self._gaps: array[float] = array("d")
        self._due = next(jobs, None)
        self._free_users = [0.0] * users  # heap of the times since which users are free
        self._ready: list[tuple[float, int]] = []  # heap of (start of the next step, busy replica)
        self._kv = [_KvUse() for _ in replicas]

    def run(self) -> Outcome:
        """Process events in the order of their times until the last request has ended."""
        while True:
            arrival, step = self._next_arrival(), self._ready[0][0] if self._ready else _NEVER
            if arrival == step == _NEVER:
                break
            if arrival <= step:
                self._arrive(arrival)
            else:
                self._step(heapq.heappop(self._ready)[1])
        shares = [kv.shares(replica.pool.num_blocks) for kv, replica in zip(self._kv, self._replicas)]
        return Outcome(self._requests, self._gaps, self._replicas, shares)

    def _next_arrival(self) -> float:
        if self._due is None:
            return _NEVER
        if self._due.due is not None:
            return self._due.due
        return self._free_users[0] if self._free_users else _NEVER

    def _arrive(self, now: float) -> None:
        job = self._due
        assert job is not None
        self._due = next(self._jobs, None)
        if job.due is None:
            heapq.heappop(self._free_users)
        prompt = self._prompts.make(job)
        index = self._router.choose(prompt, self._replicas)
        replica, request = self._replicas[index], Served(job, now, index)
        was_idle = not replica.has_work
        request.error = replica.send(len(self._requests), prompt, job, now)
        self._requests.append(request)
        if request.error is not None:
            self._leave(request, now)
        elif was_idle:
            replica.now = max(replica.now, now)
            heapq.heappush(self._ready, (replica.now, index))

    def _step(self, index: int) -> None:
        replica = self._replicas[index]
        begun = replica.now
        message = replica.step()
        now = replica.now
        self._kv[index].add(now - begun, message.stats.blocks_used)
        for delta in message.deltas:
            request = self._requests[delta.request_id]
            if request.first is None:
                request.first = now
            else:
                self._gaps.append(now - request.last)
            request.last = now
            request.tokens += 1
            if delta.finish_reason is not None:
                self._leave(request, now)
        if replica.has_work:
            heapq.heappush(self._ready, (now, index))

    def _leave(self, request: Served, now: float) -> None:
        if request.job.due is None:
            heapq.heappush(self._free_users, now)
