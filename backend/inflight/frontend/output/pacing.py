"""Decides when a stream's next response is due, so that sending stays within a budget of CPU time."""

from __future__ import annotations

import os
from typing import Protocol

from inflight.config import EngineConfig

__all__ = ["Pacing", "pacing_for"]

_SHARE = 0.03  # of a CPU engine's cores, for sending
_LONGEST_WAIT, _MOST_TOKENS = 0.1, 8  # seconds, and tokens of a response
# Beside an engine on a device, the sender thread has most of a core; parsing, which shares its lock, has the rest.
_DEVICE_CORES = 0.7
_DEVICE_LONGEST_WAIT, _DEVICE_MOST_TOKENS = 0.04, 32
# A response is sent when a token arrives, together with those of other streams; without a token, only at `_LATEST`.
# Waking up for each stream on its own would cost as much as it saves.
_EARLIEST, _LATEST = 0.8, 1.25  # times the wait
_FIRST_COST, _MOST_COST = 0.0003, 0.001  # seconds per response
_WEIGHT = 0.05  # of a new observation in a running mean


def pacing_for(config: EngineConfig, device: str) -> Pacing | None:
    """The pacing of `stream_interval: "auto"` for an engine on `device`; None: nothing waits."""
    if config.stream_interval != "auto":
        return None
    if device != "cpu":
        return Pacing(_DEVICE_CORES, _DEVICE_LONGEST_WAIT, _DEVICE_MOST_TOKENS)
    return Pacing(_SHARE * (config.cpu_threads or len(os.sched_getaffinity(0))))


class PacedStream(Protocol):
    """The part of a stream that pacing needs."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens that no response has contained yet."""

    @property
    def sent_time(self) -> float:
        """`time.monotonic()` seconds of the last response."""


class Pacing:
    """Spaces the responses of each stream if sending every token would take too much CPU time.

    `wait` = (streams that receive tokens) x (measured seconds that the sender thread needs for a response) / budget.
    With one response per stream in that time, sending takes its budget.  If steps take longer than that (few streams,
    a large model), every token is sent at once.

    Args:
        budget: number of cores for sending, such as 0.06.
        longest_wait: limit of `wait`, in seconds.
        most_tokens: new tokens that do not wait.

    Attributes:
        wait: approximate seconds from one response of a stream to the next.
        most_tokens: new tokens that do not wait.
    """

    def __init__(self, budget: float, longest_wait: float = _LONGEST_WAIT, most_tokens: int = _MOST_TOKENS) -> None:
        self._budget = budget
        self._longest_wait = longest_wait
        self.most_tokens = most_tokens
        self._num_streams = 0.0
        self._cost = _FIRST_COST
        self.wait = 0.0

    def step(self, num_streams: int) -> None:
        """A step returned tokens for `num_streams` streams."""
        self._num_streams += (num_streams - self._num_streams) * _WEIGHT
        self.wait = min(self._longest_wait, self._num_streams * self._cost / self._budget)

    def sent(self, seconds: float) -> None:
        """The sender thread needed `seconds` for a response."""
        self._cost += (min(seconds, _MOST_COST) - self._cost) * _WEIGHT

    def due(self, stream: PacedStream, now: float) -> float | None:
        """When the stream should get its next response, in seconds of `time.monotonic()`; None: now."""
        if stream.num_new_tokens >= self.most_tokens or now - stream.sent_time >= _EARLIEST * self.wait:
            return None
        return stream.sent_time + _LATEST * self.wait

    def early(self, stream: PacedStream) -> float:
        """Until when further tokens of a stream that waits can wait, too, in seconds of `time.monotonic()`."""
        return stream.sent_time + _EARLIEST * self.wait
