"""Requests with a grammar start once it is compiled.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.request import Request
from inflight.grammars.base import Grammars

__all__ = ["GrammarAdmission"]

_WAIT_SECONDS = 60.0  # compiling ends or fails before that


class GrammarAdmission(EngineListener):
    """Implements `AdmissionPolicy`: `inner`, but only once the grammar is compiled.  Compiling starts on arrival."""

    def __init__(self, inner: AdmissionPolicy, grammars: Grammars) -> None:
        self._inner = inner
        self._grammars = grammars

    def arrived(self, sequences: Sequence[Request]) -> None:
        spec = sequences[0].params.grammar
        if spec is not None:
            self._grammars.start(spec)
            for request in sequences:
                self._grammars.forget((request.request_id, request.index))

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        spec = request.params.grammar
        if spec is not None:
            outcome = self._grammars.outcome(spec)
            if outcome != "":
                refused = f"structured output that is not supported: {outcome}" if outcome else ""
                return NotYet("its grammar to be compiled", _WAIT_SECONDS, refused)
        return self._inner.admits(request, prefix, running, pool)
