"""Speculation's seams: who drafts, and where guesses come from.  The answer never depends on a draft.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.engine.request import Request

__all__ = ["DraftCounts", "Drafter", "Guess", "Guesser"]


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


@dataclass(slots=True)
class Guess:
    """What might come next.

    Attributes:
        tokens: in order.
        shares: of the places that agreed so far, how many agree on each of `tokens`, 0 to 1.
        match: tokens before the first one that matched the text there.
    """

    tokens: list[int]
    shares: list[float]
    match: int


class Guesser(Protocol):
    """Guesses for one request at a time; `AdaptiveDrafter` decides how much of a guess is used.

    Attributes:
        computes: guessing takes time for each token, so only what is likely to be used may be asked for.
    """

    computes: bool

    def begin(self, running: Sequence[Request], hope: Callable[[Request], int]) -> None:
        """A step is about to be made.

        Args:
            running: requests that it may compute.
            hope: how many tokens are worth guessing for one of them.
        """

    def guess(self, request: Request, limit: int) -> Guess | None:
        """Up to `limit` tokens behind the last known one."""

    def ended(self, request: Request) -> None:
        """It will not be asked about again; also called for requests that it was never asked about."""
