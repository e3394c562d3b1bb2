"""Decides how long a suspect waits until it has the engine for itself.  No torch, no Triton."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["TrialWait"]

_SHORTEST = 1.0  # seconds


class TrialWait:
    """A trial comes when every other stream has had a token from the engine, which the suspect may kill: so no stream
    waits for two starts in a row.  A stream that gets none (it waits for a slot, say) delays it for as long as the
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
        self._served: set[int] = set()
        self._missing: set[int] | None = None  # None: nothing waits for them yet

    def engine_down(self) -> None:
        self._down_since, self._patience = self._clock(), None
        self.restart()

    def engine_ready(self, go_on: Callable[[], None]) -> None:
        """See `is_over`."""
        self._patience = max(_SHORTEST, self._clock() - self._down_since)
        if self._missing is not None:
            self._start_clock(self._missing, go_on)

    def restart(self) -> None:
        """Everyone needs another token."""
        self._served, self._missing = set(), None

    def got_token(self, request_id: int) -> None:
        self._served.add(request_id)
        self.ended(request_id)

    def ended(self, request_id: int) -> None:
        if self._missing is not None:
            self._missing.discard(request_id)

    def is_over(self, others: Callable[[], set[int]], go_on: Callable[[], None]) -> bool:
        """Whether the trial can begin.

        Args:
            others: the streams that should have had a token; those that come later do not count.
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
