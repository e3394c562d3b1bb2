"""Replicas that compute only prompts: `--prefill-replicas`, with the gateway's own policy (extra `gateway`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from inflight.engine.deltas import SequenceDelta
from inflight_client.request import GenerationRequest
from inflight_gateway.handover_policy import (
    LEAST_TOKENS,
    Costs,
    Prompt,
    Rest,
    SentPrefixes,
    can_be_handed_over,
    is_wanted,
    least_tokens,
)
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.fleet import Replica
from inflight_tools.simulator.incidents import Incidents
from inflight_tools.simulator.outcome import Handovers, Outcome, Served
from inflight_tools.simulator.peer_link import Port
from inflight_tools.simulator.router import Router
from inflight_tools.simulator.simulation import AFTER, INCIDENT, Simulation
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job

__all__ = ["HandoverSimulation"]


@dataclass(slots=True, eq=False)
class _Begun:
    """A prompt at a replica for prompts."""

    replica: Replica
    prompt: Prompt
    at: float


@dataclass(slots=True)
class _Opened:
    """A request at a replica that generates, until its next token."""

    at: float
    prompt: Prompt
    was_handed_over: bool


class _Prefill:
    """A replica for prompts, as the gateway sees it: tokens of prompts that it computes now, and its rests."""

    def __init__(self) -> None:
        self.queued = 0
        self.rest = Rest()


class HandoverSimulation(Simulation):
    """A simulation with replicas that compute only prompts, behind one process of the gateway.

    Such a replica gets a request as it is.  Its first token goes to the user.  After the latency of the network, when
    its next step has begun, it is cancelled there and goes on at a replica that the router chooses, whose engine asks
    for the KV by its content.

    Args:
        ports: of the replicas that `prefills` makes, in their order.
        handover: as of the gateway: "auto", a number of tokens, or "off".
        Others: as of `Simulation`.
    """

    def __init__(
        self,
        replicas: list[SimulatedEngine],
        router: Router,
        jobs: Iterator[Job],
        prompts: IdPrompts,
        users: int,
        incidents: Incidents | None,
        successor: Callable[[], SimulatedEngine] | None,
        scrape_interval: float,
        prefills: Sequence[Callable[[], SimulatedEngine]],
        ports: Sequence[Port],
        handover: str = "auto",
    ) -> None:
        super().__init__(replicas, router, jobs, prompts, users, incidents, successor, scrape_interval, prefills)
        self._ports, self._is_off, self._above = ports, handover == "off", least_tokens(handover)
        self._prefills: defaultdict[int, _Prefill] = defaultdict(_Prefill)
        self._sent, self._costs, self._handovers = SentPrefixes(), Costs(), Handovers()
        self._begun: dict[int, _Begun] = {}
        self._opened: dict[int, _Opened] = {}

    def run(self) -> Outcome:
        outcome = super().run()
        found, seconds = self._handovers, outcome.seconds
        found.bytes_sent = sum(port.num_bytes for port in self._ports)
        if seconds:
            found.busiest = min(1.0, max(port.link.seconds for port in self._ports) / seconds)
            size = len(self._fleet)
            busy = [replica.busy for replica in self._fleet.replicas]
            found.decode_busy = sum(busy[:size]) / seconds / size
            found.prefill_busy = sum(busy[size:]) / seconds / (len(busy) - size)
        outcome.handovers = found
        return outcome

    def _place(self, number: int, now: float) -> None:
        request = self._requests[number]
        is_new = not (request.resumed or request.tokens)
        if is_new and not self._is_off and self._fleet.ready and self._prefill(number, request, now):
            return
        super()._place(number, now)

    def _prefill(self, number: int, request: Served, now: float) -> bool:
        """Give a new request to a replica for prompts, if that is wanted."""
        ids = self._prompts.make(request.job)
        sampling = {"max_tokens": request.job.output_tokens}
        asked = GenerationRequest(model="", input_ids=ids, sampling=sampling)
        if not can_be_handed_over(asked):
            return False
        prompt = self._sent.sent(asked)
        tokens = prompt.tokens - prompt.cached
        free = [index for index in self._fleet.ready_prefills if self._is_free(index, now)]
        chosen = min(free, key=lambda index: self._prefills[index].queued, default=None)
        queued = 0 if chosen is None else self._prefills[chosen].queued
        is_measured = self._above is None and tokens >= LEAST_TOKENS
        if is_wanted(self._above, self._costs, now, tokens, queued):
            is_measured = is_measured or chosen is not None
            if chosen is None:
                self._handovers.outcomes["busy"] += 1
            elif self._begin_at(number, ids, prompt, chosen, now):
                return True
        if is_measured:
            self._opened[number] = _Opened(now, prompt, False)
        return False

    def _is_free(self, index: int, now: float) -> bool:
        prefill = self._prefills[index]
        return prefill.rest.is_over(now, prefill.queued)

    def _begin_at(self, number: int, ids: list[int], prompt: Prompt, index: int, now: float) -> bool:
        prefill, replica = self._prefills[index], self._fleet.replicas[index]
        refused = self._send(number, ids, replica, now)
        if refused is not None:
            self._handovers.outcomes["refused"] += 1
            if refused.code == "UNAVAILABLE":  # else the others say the same
                prefill.rest.failed(now, refused.retry_after)
            return False
        patience = self._costs.patience(now, prefill.queued + prompt.tokens)
        prefill.queued += prompt.tokens - prompt.cached
        self._begun[number] = begun = _Begun(replica, prompt, now)
        self._at(INCIDENT, now + patience, partial(self._be_late, number, begun, patience))
        return True

    def _be_late(self, number: int, begun: _Begun, seconds: float, now: float) -> None:
        """Its patience is over: if it has no token yet, the request goes to the others."""
        if self._begun.get(number) is not begun:
            return
        prefill = self._left(number, "late")
        self._costs.was_late(now, seconds, prefill.queued + begun.prompt.tokens)
        prefill.rest.failed(now)
        self._fleet.remove(begun.replica, number)
        begun.replica.engine.abort(number)
        self._opened[number] = _Opened(now, begun.prompt, False)
        super()._place(number, now)

    def _left(self, number: int, outcome: str) -> _Prefill:
        """A request is no longer at its replica for prompts."""
        begun = self._begun.pop(number)
        prefill = self._prefills[begun.replica.index]
        prefill.queued -= begun.prompt.tokens - begun.prompt.cached
        self._handovers.outcomes[outcome] += 1
        return prefill

    def _move(self, numbers: list[int], engine: SimulatedEngine, now: float) -> None:
        for number in numbers:
            begun = self._begun.get(number)
            if begun is not None:
                self._left(number, "failed").rest.failed(now)
                self._opened[number] = _Opened(now, begun.prompt, False)
        super()._move(numbers, engine, now)

    def _take(self, replica: Replica, delta: SequenceDelta, now: float, disturbed_since: float) -> None:
        number = delta.request_id
        request = self._requests[number]
        if number in self._opened:
            self._measure(self._opened.pop(number), request, delta, now)
        super()._take(replica, delta, now, disturbed_since)
        if number in self._begun:
            self._hand_over(number, request, now)

    def _hand_over(self, number: int, request: Served, now: float) -> None:
        """Its first token has come from a replica for prompts."""
        begun = self._begun[number]
        self._left(number, "ended" if request.ended else "handed_over").rest.answered()
        computed = begun.prompt.tokens - request.cached
        if computed >= LEAST_TOKENS:
            self._costs.prefill.add(now, (now - begun.at) / computed)
        if not request.ended:
            self._fleet.remove(begun.replica, number)
            self._opened[number] = _Opened(now, begun.prompt, True)
            then = now + self._ports[0].spec.latency
            self._at(AFTER, then, partial(self._continue, number, begun.replica.engine))

    def _continue(self, number: int, engine: SimulatedEngine, now: float) -> None:
        engine.abort(number)
        super()._place(number, now)

    def _measure(self, opened: _Opened, request: Served, delta: SequenceDelta, now: float) -> None:
        took = now - opened.at
        if opened.was_handed_over:
            self._costs.transfer.add(now, took)
            self._handovers.gaps.append(took)
            return
        computed = opened.prompt.tokens - (delta.num_cached_tokens or 0)
        if computed >= LEAST_TOKENS:
            self._costs.alone.add(now, took / computed)
