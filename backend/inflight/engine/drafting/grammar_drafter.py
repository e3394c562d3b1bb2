"""Tokens that a grammar leaves no choice about, computed in one step instead of one each.  No torch.

They are drafts like any others: the target's choice under the grammar's masks is what is emitted.  Where a mask admits
one token, that choice is certain; where a text is certain that could be cut into tokens in several ways, the draft is
the tokenizer's, and a model that would cut it otherwise does.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.drafting.drafter import Drafter
from inflight.engine.events import EngineListener
from inflight.engine.request import Request
from inflight.grammars.base import Grammar, Grammars

__all__ = ["GrammarDrafter"]


class GrammarDrafter(EngineListener):
    """Implements `Drafter`: what grammars force, else what `inner` proposes.

    Args:
        inner: asked for requests without a grammar, and where a grammar leaves a choice.
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
        if num_unknown:  # nobody knows where the grammar stands
            return ()
        if request.draft_state is None:
            grammar = self._grammars.new(request.params.grammar)
            request.draft_state = _Progress(grammar, request.num_prompt_tokens)
        progress: _Progress = request.draft_state
        forced = progress.forced(request, limit)
        progress.is_forced = bool(forced)
        return forced or progress.allowed(self._proposed_by_inner(request, 0, limit))

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        is_forced = request.draft_state is not None and request.draft_state.is_forced
        if self._inner is not None and not is_forced:
            self._inner.observe(request, num_drafts, num_accepted)

    def _proposed_by_inner(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        if self._inner is None or not self._inner.active:
            return ()
        return self._inner.propose(request, num_unknown, limit)


class _Progress:
    """A request's grammar, and how many of its tokens the grammar has taken.

    Attributes:
        is_forced: the drafts that are being verified are those of the grammar.
    """

    def __init__(self, grammar: Grammar, num_tokens: int) -> None:
        self._grammar = grammar
        self._num_tokens = num_tokens
        self.is_forced = False

    def forced(self, request: Request, limit: int) -> list[int]:
        self._grammar.advance(request.token_ids[self._num_tokens : request.num_tokens].tolist())
        self._num_tokens = request.num_tokens
        return self._grammar.forced(limit)

    def allowed(self, drafts: Sequence[int]) -> Sequence[int]:
        """Those before the first that the grammar refuses; asked right after `forced`."""
        return drafts[: self._grammar.num_allowed(drafts)] if drafts else drafts
