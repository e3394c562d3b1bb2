"""Sends a load to replicas on a virtual clock and writes down what its users would have seen."""

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
    """One request; times are virtual seconds.

    Attributes:
        replica: index of the engine that had it.
        first, last: when its first and its last token so far came.
        error: why it was refused.
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
        """Mean seconds of a token behind the first; None where there is none."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Outcome:
    """What became of a load.

    Attributes:
        requests: in order of arrival.
        gaps: seconds between two tokens of a request, all of them.
        replicas: the engines, as they were at the end.
        kv_use: per replica, (mean over its steps' time, most) of the share of its blocks in use.
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
    blocks: float = 0.0  # times seconds
    most: int = 0

    def add(self, seconds: float, blocks: int) -> None:
        self.seconds += seconds
        self.blocks += seconds * blocks
        self.most = max(self.most, blocks)

    def shares(self, num_blocks: int) -> tuple[float, float]:
        mean = self.blocks / self.seconds if self.seconds else 0.0
        return mean / num_blocks, self.most / num_blocks


class Simulation:
    """A load on its way.

    Requests with a due time come then (open loop).  Those without come when one of `users` is free
    (closed loop), `users` of them at the start.

    Args:
        replicas: idle engines at time 0.
        router: sends each request to one of them.  It sees a step's outcome when the step begins.
        jobs: the load, not endless.
        prompts: makes its prompts.
        users: requests open at once in a closed loop.
    """

    def __init__(
        self, replicas: list[SimulatedEngine], router: Router, jobs: Iterator[Job], prompts: IdPrompts, users: int = 1
    ) -> None:
        self._replicas, self._router, self._jobs, self._prompts = replicas, router, jobs, prompts
        self._requests: list[Served] = []
        self._gaps: array[float] = array("d")
        self._due = next(jobs, None)
        self._free_users = [0.0] * users  # since when each is free; a heap
        self._ready: list[tuple[float, int]] = []  # when which busy replica begins its next step; a heap
        self._kv = [_KvUse() for _ in replicas]

    def run(self) -> Outcome:
        """Until the last request has ended; events in the order of their times."""
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
