"""The interfaces of speculation: drafters and their guessers.  The output never depends on a draft.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.engine.request import Request

__all__ = ["DraftCounts", "Drafter", "Guess", "Guesser"]


@dataclass(slots=True)
class DraftCounts:
    """Totals of drafts, without the drafts that a grammar forces.

    Attributes:
        drafts: rows that verified a draft.
        tokens: tokens of these drafts.
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

    `Request.draft_state` belongs to the drafter that the scheduler calls.
    """

    @property
    def active(self) -> bool:
        """Whether any running request can get a draft; read once per step."""

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        """Guess up to `limit` tokens that follow; any number of them, none included.

        Args:
            num_unknown: tokens after the request's known ones that steps in flight are sampling; the first
                draft is at position `request.num_tokens + num_unknown`.

        Returns:
            Token ids of the vocabulary.
        """

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The target chose the first `num_accepted` of `num_drafts` drafts itself."""


@dataclass(slots=True)
class Guess:
    """A guess at the next tokens.

    Attributes:
        tokens: in order.
        shares: for each of `tokens`, the share, 0 to 1, of the places that agreed so far that agree on it.
        match: length of the matching text before the first token.
    """

    tokens: list[int]
    shares: list[float]
    match: int


class Guesser(Protocol):
    """Guesses for one request at a time; `AdaptiveDrafter` decides how much of a guess is used.

    Attributes:
        computes: guessing takes time for each token, so ask only for tokens that are likely to be used.
    """

    computes: bool

    def begin(self, running: Sequence[Request], hope: Callable[[Request], int]) -> None:
        """The scheduler is about to make a step.

        Args:
            running: requests that it may compute.
            hope: how many tokens are worth guessing for a request.
        """

    def guess(self, request: Request, limit: int) -> Guess | None:
        """Guess up to `limit` tokens after the last known one; None: no guess."""

    def ended(self, request: Request) -> None:
        """The request ended; also called for requests that had no guess."""
