"""CPU time that threads may use beside the steps.  No torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput

__all__ = ["Pace"]

_SHARE = 0.1  # of the time beside running requests in which threads may use a core
_MOST_EARNED = 1e-2  # CPU seconds of a step
_SMOOTHING = 0.25
_IDLE_SECONDS = 0.02  # since the last step: the next one of a busy engine begins sooner


class Pace(EngineListener):
    """Beside running requests, threads lengthen steps by a tenth, or less; they share what it allows.

    A CPU computes a step on all of its cores, so each moment of another thread makes one of them late.  A step earns
    CPU time for threads in the next one, which may be shorter: the shorter of the last two counts, with the CPU time
    that it had at most, since other processes may have delayed it.

    Attributes:
        left: CPU seconds that threads may still use in this step.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self.clock, self._cpu_clock = clock, cpu_clock
        self._began = clock(), cpu_clock()  # the step that is made
        self.left = math.inf
        self._last = 0.0  # what the step before allowed
        self._earned = self._took = 0.0  # CPU seconds for threads, and seconds, of a step beside requests: smoothed
        self._is_stepping, self._changed = False, threading.Condition()

    def step_begins(self, running: Sequence[Request]) -> None:
        now = self.clock(), self._cpu_clock()
        took = now[0] - self._began[0]
        allowed = min(_MOST_EARNED, _SHARE * min(took, now[1] - self._began[1]))
        earned, self._last, self._began = min(allowed, self._last), allowed, now
        if running:
            self._earned += _SMOOTHING * (earned - self._earned)
            self._took += _SMOOTHING * (took - self._took)
        with self._changed:
            self.left = (earned if running else math.inf) + min(self.left, 0.0)
            self._changed.notify_all()

    def step_made(self, out: SchedulerOutput) -> None:
        self._is_stepping = True

    def step_done(self, step: DoneStep) -> None:
        self._is_stepping = False

    step_failed = step_done

    def seconds_for(self, cpu_seconds: float) -> float:
        """Until threads may have used so many more."""
        return max(0.0, cpu_seconds - self.left) * (self._took / self._earned if self._earned else 1 / _SHARE)

    def spend(self, cpu_seconds: float, most: float) -> float:
        """A thread has used so much: wait until it may go on, for `most` seconds at most; returns how many it waited.

        While no step runs it may go on: none has begun for longer than a busy engine's thread takes between two.
        """
        began = self.clock()
        with self._changed:
            self.left -= cpu_seconds
            while (waited := self.clock() - began) < most and self.left <= 0:
                if not (self._changed.wait(min(_IDLE_SECONDS, most - waited)) or self._is_stepping):
                    self.left = math.inf
        return waited
