"""Decides how long suspects that may well kill the engine wait for everyone else.  No torch, no Triton."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from inflight.engine.deltas import SequenceDelta

__all__ = ["RiskWait"]

_SHORTEST = 1.0  # seconds
_TOKENS = 4  # bytes of a character, so the client sees one: each can be a token, which has no text before the last


class RiskWait:
    """The suspects come when every other stream has had a few tokens from the engine: so none of these waits for two
    starts of an engine in a row.  A stream that gets none (it waits for a slot, say) delays them for as long as the
    engine took to start, since it would wait that much longer after a death.  Used by the sender thread.

    Args:
        later: runs a function in the sender thread after so many seconds.
        clock: in seconds.
    """

    def __init__(
        self, later: Callable[[float, Callable[[], None]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._later = later
        self._clock = clock
        self._down_since = clock()
        self._patience: float | None = None  # seconds; None: no engine is up
        self._tokens: Counter[tuple[int, int]] = Counter()  # of each sequence
        self._served: set[int] = set()
        self._missing: set[int] | None = None  # None: nothing waits for them yet

    def engine_down(self) -> None:
        self._down_since, self._patience = self._clock(), None
        self.restart()

    def engine_ready(self, go_on: Callable[[], None]) -> None:
        """Another engine is up; `go_on`: see `is_over`."""
        self._patience = max(_SHORTEST, self._clock() - self._down_since)
        if self._missing:
            self._start_clock(self._missing, go_on)

    def restart(self) -> None:
        """Everyone needs tokens again."""
        self._tokens.clear()
        self._served, self._missing = set(), None

    def got_tokens(self, delta: SequenceDelta) -> None:
        key = delta.request_id, delta.index
        self._tokens[key] += len(delta.token_ids)
        if self._tokens[key] >= _TOKENS:
            self._served.add(delta.request_id)
            self.ended(delta.request_id)

    def ended(self, request_id: int) -> None:
        """A stream was closed."""
        if self._missing is not None:
            self._missing.discard(request_id)

    def is_over(self, others: Callable[[], set[int]], go_on: Callable[[], None]) -> bool:
        """Whether the suspects can run.

        Args:
            others: the streams that should have had tokens; later ones do not count.
            go_on: called when the wait has been long enough.
        """
        if self._missing is None:
            self._missing = others() - self._served
            if self._missing and self._patience is not None:
                self._start_clock(self._missing, go_on)
        return not self._missing

    def _start_clock(self, missing: set[int], go_on: Callable[[], None]) -> None:
        def give_up() -> None:
            missing.clear()
            go_on()

        assert self._patience is not None
        self._later(self._patience, give_up)
