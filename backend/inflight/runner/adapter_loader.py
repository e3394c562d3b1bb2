"""The thread that loads adapters, in slices: steps that compute on the same cores leave it some of their time."""

from __future__ import annotations

import time
from collections.abc import Callable

from inflight.engine.adapter import LoaderPace
from inflight.runner.tier_threads import TierThreads

__all__ = ["AdapterLoader"]

# Seconds that a load waits for the pace, in all: a request waits for 60 s, and others' loads may be ahead of its own.
_MOST_WAITED = 15.0


class AdapterLoader:
    """Runs loads one after the other, in the order in which they were submitted.

    Not at idle priority, though that needs no pace: on busy cores such a load takes seconds, or never ends, and it keeps
    what it has locked meanwhile.

    Args:
        thread_clock: CPU seconds that the calling thread has had.
    """

    def __init__(self, thread_clock: Callable[[], float] = time.thread_time) -> None:
        self.pace: LoaderPace | None = None
        self._thread_clock = thread_clock
        self._threads = TierThreads(1, "adapters", 0)  # a daemon, which starts with the first load
        self._used = self._waited = 0.0

    def submit(self, load: Callable[[], None]) -> None:
        self._threads.submit(self._run, load)

    def pause(self) -> None:
        """Called by a load, in its thread, after each slice of its work: about a millisecond."""
        if self.pace is None:
            return
        used = self._thread_clock()
        self._waited += self.pace.spend(used - self._used, max(0.0, _MOST_WAITED - self._waited))
        self._used = self._thread_clock()

    def _run(self, load: Callable[[], None]) -> None:
        self._used, self._waited = self._thread_clock(), 0.0
        load()
