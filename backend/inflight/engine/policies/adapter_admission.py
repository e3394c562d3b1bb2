"""Requests with an adapter start once it is in memory.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.engine.adapter import AdapterRef, Adapters
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet, Rank
from inflight.engine.request import Request

__all__ = ["AdapterAdmission"]

_WAIT_SECONDS = 60.0


class AdapterAdmission(EngineListener):
    """Implements `AdmissionPolicy`: `inner`, but only once the adapter is loaded.  Loading starts on arrival.

    A request that has begun holds its adapter until it ends, for all its sequences, preempted or not.
    """

    def __init__(self, inner: AdmissionPolicy, adapters: Adapters, rank: Rank, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._clock = clock
        self._adapters = adapters
        self._open: dict[str, dict[int, set[Request]]] = {}  # id of the adapter -> of the request -> its sequences
        self._begun: set[int] = set()  # ids of requests
        self._left: dict[Request, float] = {}  # of one that has waited: seconds until it fails
        adapters.reset(rank.goes_before)

    def arrived(self, sequences: Sequence[Request]) -> None:
        ref = _adapter_of(sequences[0])
        if ref is not None:
            self._open.setdefault(ref.id, {})[sequences[0].request_id] = set(sequences)
            self._adapters.start(ref)

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        ref = _adapter_of(request)
        if ref is not None:
            outcome = self._adapters.outcome(ref, request, request.request_id in self._begun)
            if not outcome.ready:
                left = self._left.setdefault(request, _WAIT_SECONDS)
                return NotYet(f"its adapter {ref.name!r} to be loaded", left, outcome.failure)
            if request in self._left and request.held_until is not None:  # another one can still take its slot
                self._left[request] = request.held_until - self._clock()
        answer = self._inner.admits(request, prefix, running, pool)
        if ref is not None and answer not in (True, False):
            self._adapters.forget(ref)  # others may run in its place until the rest is there, too
            self._left.pop(request, None)
        return answer

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        ref = _adapter_of(request)
        if ref is not None and request.request_id not in self._begun:
            self._begun.add(request.request_id)
            self._adapters.hold(ref)

    def ended(self, request: Request) -> None:
        ref = _adapter_of(request)
        if ref is None:
            return
        self._left.pop(request, None)
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

    def step_done(self, step: DoneStep) -> None:
        self._adapters.step_done(step.end - step.start, step.stats.running)

    step_failed = step_done


def _adapter_of(request: Request) -> AdapterRef | None:
    return None if request.attached is None else request.attached.adapter
