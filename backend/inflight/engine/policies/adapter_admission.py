"""Requests with an adapter start once it is in memory.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.adapter import AdapterRef, Adapters
from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.request import Request

__all__ = ["AdapterAdmission"]

_WAIT_SECONDS = 60.0


class AdapterAdmission(EngineListener):
    """Implements `AdmissionPolicy`: `inner`, but only once the adapter is loaded.  Loading starts on arrival."""

    def __init__(self, inner: AdmissionPolicy, adapters: Adapters) -> None:
        self._inner = inner
        self._adapters = adapters
        self._open: dict[str, set[Request]] = {}  # by adapter
        adapters.reset()

    def arrived(self, sequences: Sequence[Request]) -> None:
        ref = _adapter_of(sequences[0])
        if ref is not None:
            self._open.setdefault(ref.id, set()).update(sequences)
            self._adapters.start(ref)

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        ref = _adapter_of(request)
        if ref is not None:
            outcome = self._adapters.outcome(ref)
            if outcome != "":
                return NotYet(f"its adapter {ref.name!r} to be loaded", _WAIT_SECONDS, outcome or "")
        return self._inner.admits(request, prefix, running, pool)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        ref = _adapter_of(request)
        if ref is not None:
            self._adapters.hold(ref)

    def left(self, request: Request) -> None:
        ref = _adapter_of(request)
        if ref is not None:
            self._adapters.release(ref)

    def ended(self, request: Request) -> None:
        ref = _adapter_of(request)
        if ref is None:
            return
        sequences = self._open[ref.id]
        sequences.discard(request)
        if not sequences:
            del self._open[ref.id]
            self._adapters.forget(ref)


def _adapter_of(request: Request) -> AdapterRef | None:
    return None if request.attached is None else request.attached.adapter
