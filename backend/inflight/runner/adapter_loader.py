"""The thread that loads adapters, and the pace at which it works beside steps on the same cores.

A load works in slices, and asks before each next one.  Most have less than a millisecond; the longest packs one
projection (two cores of an Intel Xeon, gate and up of an 8B: 1.2 ms at rank 16, 3.9 ms at rank 64):

    steps     | decode ......... | decode ......... | decode ......... |
    loader    s s s s            s s s              s s s s

A CPU computes a step on all of its cores, so each moment of another thread makes one of them late.  The loader may
take a tenth of the shorter one of the last two steps, so that gaps between tokens grow by a tenth, or less.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from inflight.runner.tier_threads import TierThreads

__all__ = ["LoaderPace", "LoaderThread"]

_SHARE = 0.1
_MOST_EARNED = 1e-2  # CPU seconds of a step: the next one may be short
# Seconds after which a load waits no more.  They count from its submission: its request waits for 60 in all, and other
# loads may be ahead of it.
_MOST_WAITED = 15.0
# Without a step for so long, and for so many times the last one's time, none runs: all requests were aborted.
_STALE_SECONDS, _STALE_STEPS = 1.0, 4


class LoaderPace:
    """How much CPU time the loader may use beside running requests.  Beside none, it never waits.

    A step is counted with the CPU time that it had at most: other processes may have delayed it.

    Args:
        is_taken: whether KV is loaded from tiers, which has 0.06 of a core for itself: then the loader gets nothing.
        cpu_clock: seconds of all cores that this process has had.
    """

    def __init__(
        self,
        is_taken: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._is_taken, self._clock, self._cpu_clock = is_taken, clock, cpu_clock
        self._left = math.inf  # CPU seconds of the step that runs
        self._allowed = 0.0  # by the step before the last one
        self._done, self._took = (clock(), cpu_clock()), 0.0  # the last step: when, and its seconds
        self._changed = threading.Condition()

    def step_done(self, seconds: float, num_running: int) -> None:
        """In the engine's thread."""
        now = self._clock(), self._cpu_clock()
        allowed = min(_MOST_EARNED, _SHARE * min(seconds, now[1] - self._done[1]))
        earned, self._allowed = min(allowed, self._allowed), allowed
        if self._is_taken():
            earned = 0.0
        with self._changed:
            self._done, self._took = now, seconds
            self._left = (earned if num_running else math.inf) + min(self._left, 0.0)
            self._changed.notify_all()

    def spend(self, cpu_seconds: float, most: float) -> float:
        """In the loader's thread: it has used so much; wait until it may go on, for `most` seconds at most.

        Without any left it works freely, and leaves no debt to the next load.

        Returns:
            How many it waited.
        """
        if most <= 0:
            return 0.0
        began = self._clock()
        with self._changed:
            self._left -= cpu_seconds
            while self._left <= 0 and (waited := self._clock() - began) < most:
                stale = max(_STALE_SECONDS, _STALE_STEPS * self._took) - (self._clock() - self._done[0])
                if stale <= 0:
                    self._left = math.inf
                    break
                self._changed.wait(min(most - waited, stale))
        return self._clock() - began


class LoaderThread:
    """Runs loads one after the other, in the order in which they were submitted.

    Not at idle priority, though that needs no pace: beside steps on all cores such a load takes seconds, or does not
    end at all on a busy machine, and keeps its locks meanwhile.

    Args:
        pace: None: it never waits.
        thread_clock: CPU seconds that the calling thread has had.
        clock: seconds.
    """

    def __init__(
        self,
        pace: LoaderPace | None,
        thread_clock: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace, self._thread_clock, self._clock = pace, thread_clock, clock
        self._threads = TierThreads(1, "adapters", 0)  # a daemon, which starts with the first load
        self._used = self._waited = self._submitted = 0.0

    @property
    def waited(self) -> float:
        """Seconds that the load whose thread asks has waited for its pace: they cost no tenant anything."""
        return self._waited

    def submit(self, load: Callable[[], None]) -> None:
        """Do `load` once the earlier ones are done."""
        self._threads.submit(self._run, load, self._clock())

    def pause(self) -> None:
        """Called by a load, in its thread, after each slice of its work."""
        if self._pace is None:
            return
        most = self._submitted + _MOST_WAITED - self._clock()
        self._waited += self._pace.spend(self._thread_clock() - self._used, most)
        self._used = self._thread_clock()

    def _run(self, load: Callable[[], None], submitted: float) -> None:
        self._used, self._waited, self._submitted = self._thread_clock(), 0.0, submitted
        load()
