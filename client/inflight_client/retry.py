"""Decides when a request is sent again: before any output has arrived, or for the rest of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["RetryPolicy"]


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter for a server that reports UNAVAILABLE or cannot be reached.

    Before the k-th retry (from 0) the client waits between `(1 - jitter) * d` and `d` seconds, where
    `d = min(max_delay, initial_delay * multiplier**k)`.  If there is no other server, it waits at least as long as the
    server asks for.

    An interrupted stream (the connection broke, the server reports UNAVAILABLE, or no response arrives) is continued
    after the output that has arrived: nothing is lost or repeated.

    Attributes:
        max_attempts: attempts per request, including the first; 1 never retries.
        resume_attempts: as `max_attempts`, once output that can be continued has arrived; None: `max_attempts`.
        initial_delay, max_delay: seconds.
        multiplier: growth of the delay, >= 1.
        jitter: random share of the delay, 0 to 1; keeps clients from returning in lockstep.
        total_timeout: no attempt starts more than this many seconds after the first; None for no limit.
        max_refusals: maximum number of refusals with UNAVAILABLE before the first output, here or elsewhere
            (`resume_token_ids`); None: limited only by `max_attempts`.
        max_retry_after: seconds; a server that asks for more ends the request, except for the rest of an output within
            `outage_timeout`.
        resume: continue interrupted streams; None: if the client has several servers.
        outage_timeout: seconds during which a request waits for a server, from its first failed attempt since the last
            response; in the place of both numbers of attempts.  None: attempts are counted.
        stall_timeout: seconds without a response after which a stream that can be continued counts as interrupted;
            before its first output, only if the model is not ready or does not answer.  None: never.
    """

    max_attempts: int = 4
    resume_attempts: int | None = None
    initial_delay: float = 0.1
    max_delay: float = 5.0
    multiplier: float = 2.0
    jitter: float = 0.5
    total_timeout: float | None = None
    max_refusals: int | None = None
    max_retry_after: float = 60.0
    resume: bool | None = None
    outage_timeout: float | None = None
    stall_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        checks = {
            "max_attempts": (self.max_attempts >= 1, "at least 1"),
            "resume_attempts": (self.resume_attempts is None or self.resume_attempts >= 1, "at least 1, or None"),
            "initial_delay": (self.initial_delay >= 0, "at least 0 seconds"),
            "max_delay": (self.max_delay >= 0, "at least 0 seconds"),
            "multiplier": (self.multiplier >= 1, "at least 1"),
            "jitter": (0 <= self.jitter <= 1, "between 0 and 1"),
            "total_timeout": (self.total_timeout is None or self.total_timeout >= 0, "at least 0 seconds, or None"),
            "max_refusals": (self.max_refusals is None or self.max_refusals >= 1, "at least 1, or None"),
            "max_retry_after": (self.max_retry_after >= 0, "at least 0 seconds"),
            "outage_timeout": (self.outage_timeout is None or self.outage_timeout >= 0, "at least 0 seconds, or None"),
            "stall_timeout": (self.stall_timeout is None or self.stall_timeout > 0, "above 0 seconds, or None"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {allowed}")

    def delay(self, failures: int, elapsed: float, received: bool = False, outage: float = 0.0) -> float | None:
        """Seconds to wait after the `failures`-th failed attempt (from 1); None if no attempt is left.

        Args:
            elapsed: seconds since the first attempt started.
            received: output has arrived.
            outage: seconds since the first failure after the last response.
        """
        resumed = self.resume_attempts if received else None
        if self.outage_timeout is None and failures >= (resumed or self.max_attempts):
            return None
        # The limit keeps multiplier**k within the range of floats.
        growth = self.multiplier ** min(failures - 1, 64)
        longest = min(self.max_delay, self.initial_delay * growth)
        delay = longest * (1 - self.jitter * random.random())
        if self.total_timeout is not None and elapsed + delay > self.total_timeout:
            return None
        if self.outage_timeout is not None and outage + delay > self.outage_timeout:
            return None
        return delay
