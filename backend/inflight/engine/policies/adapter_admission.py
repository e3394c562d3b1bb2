"""Requests with an adapter start once it is in memory.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.engine.adapter import AdapterRef, Adapters, Outcome
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, LoadShares, NotYet, Rank
from inflight.engine.policies.load_turns import LoadTurns
from inflight.engine.request import Request

__all__ = ["AdapterAdmission"]

_WAIT_SECONDS = 60.0


class AdapterAdmission(EngineListener):
    """Implements `AdmissionPolicy`: `inner`, but only once the adapter is loaded.  Loading starts on arrival.

    A request that has begun holds its adapter until it ends, for all its sequences, preempted or not.

    Args:
        shares: of the tenants, which then load in turn; None: there are none.
    """

    def __init__(
        self,
        inner: AdmissionPolicy,
        adapters: Adapters,
        rank: Rank,
        shares: LoadShares | None,
        clock: Callable[[], float],
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._adapters = adapters
        self._turns = None if shares is None else LoadTurns(shares)
        self._open: dict[str, dict[int, set[Request]]] = {}  # id of the adapter -> of the request -> its sequences
        self._begun: set[int] = set()  # ids of requests
        self._left: dict[Request, float] = {}  # of one that has waited: seconds until it fails
        adapters.reset(rank.goes_before, (lambda ids, *_: ids) if self._turns is None else self._turns.leaving)

    def arrived(self, sequences: Sequence[Request]) -> None:
        ref = _adapter_of(sequences[0])
        if ref is not None:
            self._open.setdefault(ref.id, {})[sequences[0].request_id] = set(sequences)
            was_there = self._adapters.load_of(ref) is not None
            if self._turns is None or was_there or self._turns.may_begin(sequences[0]):
                self._adapters.start(ref, sequences[0])
                self._settle(ref, sequences[0], was_there)

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        ref = _adapter_of(request)
        if ref is not None:
            outcome = self._outcome(ref, request)
            if not outcome.ready:
                left = self._left.setdefault(request, _WAIT_SECONDS)
                return NotYet(f"its adapter {ref.name!r} to be loaded", left, outcome.failure)
            if request in self._left and request.held_until is not None:  # another one can still take its slot
                self._left[request] = request.held_until - self._clock()
        answer = self._inner.admits(request, prefix, running, pool)
        if ref is not None and self._turns is not None:
            self._turns.waits(ref.id, request, answer not in (True, False))
        if ref is not None and answer not in (True, False):
            self._adapters.forget(ref)  # others may run in its place until the rest is there, too
            self._left.pop(request, None)
        return answer

    def _outcome(self, ref: AdapterRef, request: Request) -> Outcome:
        """See `Adapters`; a request also waits while its load is not the next one."""
        begun = request.request_id in self._begun
        if self._turns is None:
            return self._adapters.outcome(ref, request, begun)
        outcome, was_there = Outcome(False), self._adapters.load_of(ref) is not None
        if was_there or self._turns.may_begin(request):
            outcome = self._adapters.outcome(ref, request, begun)
        if self._adapters.load_of(ref) is None and not outcome.failure:
            self._turns.wait(request)
        else:
            self._settle(ref, request, was_there)
        return outcome

    def _settle(self, ref: AdapterRef, request: Request, was_there: bool) -> None:
        """Charge a load that `request` has caused, if it has."""
        loaded = self._adapters.load_of(ref)
        if self._turns is not None and loaded is not None and not was_there:
            self._turns.began(request, ref.id, loaded)
        elif self._turns is not None:
            self._turns.forget(request)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        ref = _adapter_of(request)
        if ref is not None and request.request_id not in self._begun:
            self._begun.add(request.request_id)
            self._adapters.hold(ref)
        if self._turns is not None:
            self._turns.admitted(request, num_cached_tokens)
            if ref is not None:
                self._turns.used(ref.id)

    def ended(self, request: Request) -> None:
        ref = _adapter_of(request)
        if ref is None:
            return
        self._left.pop(request, None)
        if self._turns is not None:
            self._turns.forget(request)
        requests = self._open[ref.id]
        requests[request.request_id].discard(request)
        if requests[request.request_id]:
            return
        del requests[request.request_id]
        if request.request_id in self._begun:
            self._begun.remove(request.request_id)
            self._adapters.release(ref)
        if not requests:
            del self._open[ref.id]
            self._adapters.forget(ref)
            if self._turns is not None:
                self._turns.used(ref.id)

    def step_begins(self, running: Sequence[Request]) -> None:
        if self._turns is not None:
            self._turns.step_begins(running)

    def step_done(self, step: DoneStep) -> None:
        self._adapters.step_done(step.end - step.start, step.stats.running)
        if self._turns is not None:
            self._turns.step_done(step)

    def step_failed(self, step: DoneStep) -> None:
        self._adapters.step_done(step.end - step.start, step.stats.running)


def _adapter_of(request: Request) -> AdapterRef | None:
    return None if request.attached is None else request.attached.adapter
