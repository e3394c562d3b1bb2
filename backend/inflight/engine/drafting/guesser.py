"""Where guesses come from: a text that is copied, or a model.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight.engine.request import Request

__all__ = ["Guess", "Guesser"]


@dataclass(slots=True)
class Guess:
    """What might come next.

    Attributes:
        tokens: in order.
        shares: of the places that agreed so far, how many agree on each of `tokens`, 0 to 1.
        match: tokens right before the first one that stood there, too.
    """

    tokens: list[int]
    shares: list[float]
    match: int


class Guesser(Protocol):
    """Guesses for one request at a time; `ThriftyDrafter` decides how much of a guess is used.

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
