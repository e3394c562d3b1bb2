"""Speculation's seam: what might come next.  The target model verifies it; the answer never depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inflight.engine.request import Request

__all__ = ["Drafter"]


class Drafter(Protocol):
    """Guesses tokens ahead (Leviathan et al., arXiv:2211.17192).  Called by the scheduler alone.

    What it remembers of a request is in `Request.draft_state`.
    """

    @property
    def active(self) -> bool:
        """Whether any running request may get a draft; asked once a step."""

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        """Guess up to `limit` tokens that follow; any number of them, none included.

        Args:
            num_unknown: tokens behind the request's known ones that steps in flight are sampling; the first
                draft stands at position `request.num_tokens + num_unknown`.

        Returns:
            Token ids of the vocabulary.
        """

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The target chose the first `num_accepted` of `num_drafts` drafts itself."""
