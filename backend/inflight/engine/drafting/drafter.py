"""Speculation's seam: what might come next.  The target model verifies it; the answer never depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.engine.request import Request

__all__ = ["DraftCounts", "Drafter"]


@dataclass(slots=True)
class DraftCounts:
    """Totals of drafts; those that a grammar forces are not counted.

    Attributes:
        drafts: rows that verified a draft.
        tokens: of these drafts.
        accepted: tokens that the target chose itself.
        at: accepted tokens by their place in the draft.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    at: list[int] = field(default_factory=list)

    def totals(self) -> list[int]:
        """`drafts`, `tokens`, `accepted`, then `at`; empty if there is no drafter."""
        return [self.drafts, self.tokens, self.accepted, *self.at] if self.at else []


class Drafter(Protocol):
    """Guesses tokens ahead (Leviathan et al., arXiv:2211.17192).  Called by the scheduler alone.

    `Request.draft_state` is for the one that the scheduler calls.
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
