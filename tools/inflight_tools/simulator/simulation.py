"""Sends a load to replicas on a virtual clock and records what its users would have seen."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from inflight.engine.deltas import RequestFailed, SequenceDelta
from inflight.engine.messages import StepMessage
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.fleet import Fleet, Replica, State
from inflight_tools.simulator.incidents import Incidents
from inflight_tools.simulator.outcome import Outcome, Served
from inflight_tools.simulator.restarts import Restarts
from inflight_tools.simulator.router import Router
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job

__all__ = ["AFTER", "INCIDENT", "Simulation"]

_RETRY_SECONDS = 0.1  # until a request that was begun is offered again, if every queue is full


# Events at one time come in this order: a user that waited for a token can send a request that joins the next step.
# The gateway acts on a token when the next step at its replica has begun.
_END, INCIDENT, _ARRIVAL, _BEGIN, AFTER = range(5)


class Simulation:
    """A discrete-event simulation of a load.

    Requests with a due time arrive at that time (open loop).  Those without arrive whenever one of `users`
    is free (closed loop), the first `users` of them at the start.

    A request whose replica ends goes on at another one, from the tokens that its user has: they are computed
    again with the prompt, except for what is cached there.  While no replica is ready, requests wait for one.

    Args:
        replicas: idle engines at time 0.
        router: chooses the replica of a request.
        jobs: the load; finite.
        prompts: generates the prompts.
        users: number of users in a closed loop.
        incidents: what happens to replicas.
        successor: makes the engine of a replica that starts again.
        scrape_interval: seconds between two looks of the router at the gauges; 0: they are always current.
        prefills: as of `Fleet`; `HandoverSimulation` uses them.
    """

    def __init__(
        self,
        replicas: list[SimulatedEngine],
        router: Router,
        jobs: Iterator[Job],
        prompts: IdPrompts,
        users: int = 1,
        incidents: Incidents | None = None,
        successor: Callable[[], SimulatedEngine] | None = None,
        scrape_interval: float = 0.0,
        prefills: Sequence[Callable[[], SimulatedEngine]] = (),
    ) -> None:
        self._fleet = Fleet(replicas, successor, scrape_interval, prefills)
        self._router, self._jobs, self._prompts = router, jobs, prompts
        self._requests: list[Served] = []
        self._gaps: array[float] = array("d")
        self._disturbed = bytearray()
        self._due = next(jobs, None)
        self._free_users = [0.0] * users  # heap of the times since which users are free
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._counter = itertools.count()
        self._num_open = 0
        self._homeless: list[int] = []  # requests that wait for a replica to be ready
        self._lost_kv: dict[int, int] = {}  # tokens computed for a request at the replica that it lost
        at = partial(self._at, INCIDENT)
        self._restarts = Restarts(self._fleet, incidents or Incidents(), at, self._move, self._house)

    def run(self) -> Outcome:
        """Process events in the order of their times until the last request has ended.

        Raises:
            RuntimeError: a request did not get each of its tokens exactly once.
        """
        fleet, events = self._fleet, self._events
        while self._num_open or self._due is not None:
            arrival = self._next_arrival()
            action: Callable[[float], None]
            if events and events[0][:2] < (arrival, _ARRIVAL):
                now, _, _, action = heapq.heappop(events)
            elif arrival < math.inf:
                now, action = arrival, self._arrive
            else:
                break
            fleet.look(now)
            fleet.pass_time(now)
            if self._due is not None:
                fleet.advance(now)
            action(now)
        self._check()
        fleet.pass_time(math.inf)
        kept = [(replica.engine, replica.kv_use) for replica in fleet.replicas if replica.state is not State.DOWN]
        waiting, usage = fleet.mean_gauges
        return Outcome(
            self._requests,
            self._gaps,
            [engine for engine, _ in kept],
            [use for _, use in (*fleet.retired, *kept)],
            self._disturbed,
            [engine for engine, _ in fleet.retired],
            self._restarts.windows,
            waiting,
            usage,
            len(fleet.replicas),
        )

    def _at(self, kind: int, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, kind, next(self._counter), action))

    def _next_arrival(self) -> float:
        if self._due is None:
            return math.inf
        if self._due.due is not None:
            return self._due.due
        return self._free_users[0] if self._free_users else math.inf

    def _arrive(self, now: float) -> None:
        job = self._due
        assert job is not None
        self._due = next(self._jobs, None)
        if job.due is None:
            heapq.heappop(self._free_users)
        self._requests.append(Served(job, now))
        self._num_open += 1
        self._place(len(self._requests) - 1, now)

    def _place(self, number: int, now: float) -> None:
        """Send a request to a replica, with the tokens that its user has."""
        fleet, request = self._fleet, self._requests[number]
        if not fleet.ready:
            self._homeless.append(number)
            return
        prompt = self._prompts.make(request.job)
        refused = self._send(number, prompt, fleet.replicas[self._router.choose(prompt, fleet)], now)
        if refused is None:
            return
        if request.resumed or request.tokens:  # it was taken once
            self._at(INCIDENT, now + _RETRY_SECONDS, partial(self._place, number))
        else:
            request.error = refused.message
            self._leave(request, now)

    def _send(self, number: int, prompt: list[int], replica: Replica, now: float) -> RequestFailed | None:
        """Give a request to a replica; returns why it refuses it, if it does."""
        request, engine = self._requests[number], replica.engine
        request.replica = replica.index
        refused = engine.send(number, prompt, request.job, request.arrival, request.tokens)
        if refused is None:
            self._fleet.add(replica, number)
            if not replica.stepping:
                replica.stepping = True
                engine.now = max(engine.now, now)
                self._at(_BEGIN, engine.now, partial(self._begin, replica, engine))
        return refused

    def _house(self, now: float) -> None:
        """A replica is ready."""
        homeless, self._homeless = self._homeless, []
        for number in homeless:
            self._place(number, now)

    def _move(self, numbers: list[int], engine: SimulatedEngine, now: float) -> None:
        """The engine that had these requests is lost."""
        for number in numbers:
            request = self._requests[number]
            request.resumed += 1
            known = request.job.prompt_tokens + request.tokens
            # A request that streams has all KV but that of its last token; before that the engine knows.
            streams = request.tokens and number not in self._lost_kv
            computed = known - 1 if streams else min(engine.num_computed(number), known)
            if number in self._lost_kv:  # this engine, too, was computing again what another one had
                request.recomputed += min(computed, self._lost_kv[number])
            self._lost_kv[number] = max(computed, self._lost_kv.get(number, 0))
            self._place(number, now)

    def _begin(self, replica: Replica, engine: SimulatedEngine, now: float) -> None:
        if replica.engine is engine and replica.state is not State.DOWN:
            message = engine.step()
            self._at(_END, engine.now, partial(self._end, replica, engine, now, message))

    def _end(self, replica: Replica, engine: SimulatedEngine, begun: float, message: StepMessage, now: float) -> None:
        if replica.engine is not engine or replica.state is State.DOWN:
            return  # it died while the step ran: these tokens are lost
        self._fleet.report(replica, message.stats, now - begun)
        disturbed_since = self._restarts.disturbed_since(now)
        for delta in message.deltas:
            if delta.request_id in replica.open:  # else it was cancelled there
                self._take(replica, delta, now, disturbed_since)
        replica.stepping = engine.has_work
        if replica.stepping:
            self._at(_BEGIN, now, partial(self._begin, replica, engine))
        elif replica.state is State.DRAINING:
            self._restarts.drained(replica, now)

    def _take(self, replica: Replica, delta: SequenceDelta, now: float, disturbed_since: float) -> None:
        """The output of a request arrives at its user."""
        request = self._requests[delta.request_id]
        if request.first is None:
            request.first = now
        else:
            gap = now - request.last
            self._gaps.append(gap)
            self._disturbed.append(request.last < disturbed_since)
            request.longest_gap = max(request.longest_gap, gap)
        if delta.num_cached_tokens is not None:
            request.cached = delta.num_cached_tokens
            lost = self._lost_kv.pop(delta.request_id, 0)
            request.recomputed += max(0, lost - request.cached)
        request.last = now
        request.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._fleet.remove(replica, delta.request_id)
            self._leave(request, now)

    def _leave(self, request: Served, now: float) -> None:
        request.ended = True
        self._num_open -= 1
        if request.job.due is None:
            heapq.heappush(self._free_users, now)

    def _check(self) -> None:
        """Every request that was taken has ended, with all its tokens."""
        limit = self._fleet.replicas[0].engine.info.max_model_len
        for number, request in enumerate(self._requests):
            expected = min(request.job.output_tokens, limit - request.job.prompt_tokens)
            if request.error is None and not (request.ended and request.tokens == expected):
                raise RuntimeError(f"request {number} got {request.tokens} of its {expected} tokens")
