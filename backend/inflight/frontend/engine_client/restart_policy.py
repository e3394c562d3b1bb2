"""Decides when the next engine process is started, and when requests are refused instead.  No torch, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RestartHistory", "RestartPolicy"]


@dataclass(frozen=True)
class RestartPolicy:
    """How to treat engine processes that die or do not start.

    Attributes:
        first_delay, longest_delay: seconds.  The first restart is immediate, the second follows after `first_delay`,
            and the delay doubles up to the longest while deaths say nothing about any request: the process did not
            start, or died idle.
        healthy_seconds: an idle process that lived this long resets the delay.
        refuse_after: failed starts, or idle deaths, in a row after which requests are refused.
        give_up_after: deaths in a row under requests, without a token from any of them, after which these fail.  More
            deaths than the search for one cause among 1,000 requests takes.
    """

    first_delay: float = 0.1
    longest_delay: float = 30.0
    healthy_seconds: float = 60.0
    refuse_after: int = 3
    give_up_after: int = 16

    def delay(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row."""
        return min(self.longest_delay, self.first_delay * 2 ** min(failures - 2, 30)) if failures > 1 else 0.0


class RestartHistory:
    """Counts failed starts and deaths of engine processes in a row, and applies the policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.failed_starts = 0  # in a row
        self._barren = 0  # failed starts and idle deaths in a row
        self._fruitless = 0  # deaths in a row under requests, without a token

    @property
    def delay(self) -> float:
        """Seconds until the next start."""
        return self.policy.delay(max(self._barren, self._fruitless - self.policy.give_up_after))

    def not_started(self) -> None:
        """A process failed to start."""
        self.failed_starts += 1
        self._barren += 1

    def started(self) -> None:
        self.failed_starts = 0

    def died(self, *, had_requests: bool, had_tokens: bool, lived: float) -> None:
        """A process died after `lived` seconds."""
        if had_tokens:
            self._fruitless = 0
        if had_requests:
            self._fruitless += not had_tokens
            self._barren = 0
        else:
            self._barren = 1 if had_tokens or lived >= self.policy.healthy_seconds else self._barren + 1

    def refusal(self, cause: str, fatal: bool = False) -> str | None:
        """Why requests are refused until an engine is up; None if they can wait for it.

        Args:
            cause: of the latest death or failed start.
            fatal: the process reported that no other one can start either.
        """
        if self.failed_starts:
            if not fatal and self.failed_starts < self.policy.refuse_after:
                return None
            return f"the engine process cannot be restarted ({self.failed_starts} attempts failed): {cause}"
        if self._barren >= self.policy.refuse_after:
            return f"the engine process died {self._barren} times in a row while it was idle: {cause}"
        if self._fruitless >= self.policy.give_up_after:
            return f"the engine process died {self._fruitless} times in a row without a token: {cause}"
        return None
