"""Distinguishes an engine process that hangs from a busy one.  No torch, no Triton."""

from __future__ import annotations

from inflight.engine.deltas import StepStats

__all__ = ["Watchdog"]

_PATIENCE = 10.0  # a step can take this many times its usual time, if that is more than the timeout
_WEIGHT = 0.05  # of the latest step in the usual time


class Watchdog:
    """Watches the heartbeat of one engine process after another.

    Args:
        timeout: seconds without a heartbeat, while there is work, after which a process counts as hanging.

    Attributes:
        interval: seconds from one `is_stuck` to the next, at most.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.interval = min(1.0, timeout / 4)
        self._usual: float | None = None  # seconds per token, over the latest steps
        self._beats: int | None = None
        self._checked = 0.0
        self._silent = 0.0  # seconds

    def step_took(self, stats: StepStats) -> None:
        """A step ended."""
        if stats.scheduled_tokens:
            took = stats.step_seconds / stats.scheduled_tokens
            self._usual = took if self._usual is None else self._usual + _WEIGHT * (took - self._usual)

    def allowed(self, num_tokens: int) -> float:
        """Seconds that a step of `num_tokens` tokens can take.  Before the first step, the model's speed is unknown."""
        if self._usual is None:
            return _PATIENCE * self._timeout
        return max(self._timeout, _PATIENCE * self._usual * num_tokens)

    def is_stuck(self, now: float, beats: int | None, has_work: bool, num_tokens: int) -> bool:
        """Whether the process hangs.

        Long gaps between two calls do not count: the machine was asleep, or this process was stopped.

        Args:
            now: seconds.
            beats: of its `Heartbeat`; None if there is no process, 0 before its first beat.
            num_tokens: of the step that it runs.
        """
        passed, self._checked = now - self._checked, now
        if not beats or beats != self._beats or not has_work:
            self._beats, self._silent = beats, 0.0
            return False
        self._silent += min(passed, 2 * self.interval)
        return self._silent >= self.allowed(num_tokens)
