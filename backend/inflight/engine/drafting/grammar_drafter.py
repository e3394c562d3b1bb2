"""Drafts of the tokens that a grammar forces: one step computes several, instead of one step each.  No torch.

The engine emits the target's choice under the grammar's masks.  Where a text is forced, a mask admits one token, the
tokenizer's; on a CPU it is taken without a mask and, as a rule, without logits (`Grammar.known`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.engine.drafting.drafter import Drafter
from inflight.engine.events import EngineListener
from inflight.engine.request import Request
from inflight.grammars.base import Grammar, Grammars

__all__ = ["GrammarDrafter"]


class GrammarDrafter(EngineListener):
    """Implements `Drafter`: the tokens that a grammar forces, else the proposal of `inner`.

    Args:
        inner: proposes for requests without a grammar, and where a grammar leaves a choice.
    """

    def __init__(self, grammars: Grammars, inner: Drafter | None = None) -> None:
        self._grammars = grammars
        self._inner = inner
        self._num_running = 0  # requests with a grammar

    @property
    def active(self) -> bool:
        return self._num_running > 0 or (self._inner is not None and self._inner.active)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        self._num_running += request.params.grammar is not None

    def left(self, request: Request) -> None:
        self._num_running -= request.params.grammar is not None

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        if request.params.grammar is None:
            return self._proposed_by_inner(request, num_unknown, limit)
        if num_unknown:  # the grammar cannot follow tokens that are not known yet
            return ()
        if request.draft_state is None:
            sequence = request.request_id, request.index
            request.draft_state = _Progress(self._grammars.walk(sequence, request.params.grammar))
        progress: _Progress = request.draft_state
        grammar = progress.grammar
        start = request.num_prompt_tokens + grammar.num_tokens
        if start < request.num_tokens:
            grammar.advance(request.token_ids[start : request.num_tokens].tolist())
        forced = grammar.forced(limit)
        progress.is_forced = bool(forced)
        if forced:
            return forced
        drafts = self._proposed_by_inner(request, 0, limit)
        return drafts[: grammar.num_allowed(drafts)] if drafts else drafts

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        is_forced = request.draft_state is not None and request.draft_state.is_forced
        if self._inner is not None and not is_forced:
            self._inner.observe(request, num_drafts, num_accepted)

    def _proposed_by_inner(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        inner = self._inner
        return () if inner is None or not inner.active else inner.propose(request, num_unknown, limit)


@dataclass(slots=True)
class _Progress:
    """A request's grammar, which its logits rule shares.

    Attributes:
        is_forced: the drafts that are being verified are the grammar's.
    """

    grammar: Grammar
    is_forced: bool = False
