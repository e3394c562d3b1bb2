"""Drafts of a small model, for all sequences of a step together.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from inflight.engine.drafting.draft_model import DraftModel
from inflight.engine.drafting.guesser import Guess
from inflight.engine.request import Request

__all__ = ["ModelDrafts"]


class ModelDrafts:
    """Implements `Guesser`: the first request that asks in a step has the model run for all that will."""

    computes = True

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._running: Sequence[Request] = ()
        self._hope: Callable[[Request], int] = lambda request: 0
        self._drafts: Mapping[Request, Sequence[int]] | None = None

    def begin(self, running: Sequence[Request], hope: Callable[[Request], int]) -> None:
        self._running, self._hope, self._drafts = running, hope, None

    def guess(self, request: Request, limit: int) -> Guess | None:
        if self._drafts is None:
            self._drafts = {}  # if the model raises, it is not asked again in this step
            self._drafts = self._model.draft(self._wanted())
        tokens = list(self._drafts.get(request, ()))[:limit]
        return Guess(tokens, [1.0] * len(tokens), 0) if tokens else None

    def ended(self, request: Request) -> None:
        self._model.forget(request)

    def _wanted(self) -> dict[Request, int]:
        """Requests that sample in this step, all of which is scheduled but drafts."""
        wanted = {}
        for request in self._running:
            hoped = self._hope(request) if request.num_computed_tokens >= request.num_tokens else 0
            if hoped:
                wanted[request] = hoped + request.num_total_tokens - 1 - request.num_tokens
        return wanted
