"""Requests with a grammar start once it is compiled.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.request import Request
from inflight.grammars.base import Grammars

__all__ = ["GrammarAdmission"]

_WAIT_SECONDS = 60.0  # compiling ends before that, or fails


class GrammarAdmission:
    """Implements `AdmissionPolicy`: `inner`, and not before the grammar is there."""

    def __init__(self, inner: AdmissionPolicy, grammars: Grammars) -> None:
        self._inner = inner
        self._grammars = grammars
        self.begin = inner.begin
        self.admitted = inner.admitted
        self.left = inner.left
        self.ended = inner.ended

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        spec = request.params.grammar
        if spec is not None:
            outcome = self._grammars.outcome(spec)
            if outcome != "":
                return NotYet("its grammar to be compiled", _WAIT_SECONDS, outcome or "")
        return self._inner.admits(request, prefix, running, pool)
