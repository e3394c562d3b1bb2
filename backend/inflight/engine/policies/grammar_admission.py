"""Requests with a grammar start once it is compiled.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.drafting.grammar_drafter import ForcedTokens
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.request import Request
from inflight.grammars.base import Grammars

__all__ = ["GrammarAdmission"]

_WAIT_SECONDS = 60.0  # compiling ends before that, or fails


class GrammarAdmission:
    """Implements `AdmissionPolicy`: `inner`, and not before the grammar is there.

    Args:
        drafter: is told how many requests with a grammar run.
    """

    def __init__(self, inner: AdmissionPolicy, grammars: Grammars, drafter: ForcedTokens) -> None:
        self._inner = inner
        self._grammars = grammars
        self._drafter = drafter
        self.begin = inner.begin
        self.ended = inner.ended

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

    def admitted(self, request: Request, prefix: Sequence[int], pool: KVPool) -> None:
        if request.params.grammar is not None:
            self._drafter.count(1)
        self._inner.admitted(request, prefix, pool)

    def left(self, request: Request) -> None:
        if request.params.grammar is not None:
            self._drafter.count(-1)
        self._inner.left(request)
