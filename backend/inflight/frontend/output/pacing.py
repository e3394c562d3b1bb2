"""When a stream's next response is due, so that sending leaves the cores to the engine."""

from __future__ import annotations

import os
from typing import Protocol

from inflight.config import EngineConfig

__all__ = ["Pacing", "pacing_for"]

_SHARE = 0.03  # of the engine's cores, for what the sender thread waits for or does itself
_LONGEST_WAIT = 0.1  # seconds
_MOST_TOKENS = 8
# Responses are sent when a token comes, many streams' together, and only at `_LATEST` without: waking up for each
# stream on its own would cost as much as it saves.
_EARLIEST, _LATEST = 0.8, 1.25  # parts of the wait
_FIRST_COST, _MOST_COST = 0.0003, 0.001  # seconds a response
_WEIGHT = 0.05  # of a new observation in a running mean


def pacing_for(config: EngineConfig, device: str) -> Pacing | None:
    """The pacing of `stream_interval: "auto"` for an engine on `device`; None: nothing waits."""
    if config.stream_interval != "auto" or device != "cpu":
        return None
    return Pacing(config.cpu_threads or len(os.sched_getaffinity(0)))


class PacedStream(Protocol):
    """A stream, as far as pacing needs it."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens that no response contained yet."""

    @property
    def sent_time(self) -> float:
        """`time.monotonic()` seconds of the last response."""


class Pacing:
    """Spaces the responses of each stream, if sending every token would take too much from a CPU engine.

    `wait` is the number of streams that get tokens, times the measured seconds that a response takes the sender
    thread, over `_SHARE` of the cores: with one response a stream in that time, sending takes the share.  Where steps
    are longer than that (few streams, a large model), every token is sent at once.

    Args:
        cores: that the engine computes on, at least 1.

    Attributes:
        wait: seconds from one response of a stream to the next, about; at most `_LONGEST_WAIT`.
    """

    def __init__(self, cores: int) -> None:
        self._budget = cores * _SHARE
        self._num_streams = 0.0
        self._cost = _FIRST_COST
        self.wait = 0.0

    def step(self, num_streams: int) -> None:
        """A step brought tokens for so many streams."""
        self._num_streams += (num_streams - self._num_streams) * _WEIGHT
        self.wait = min(_LONGEST_WAIT, self._num_streams * self._cost / self._budget)

    def sent(self, seconds: float) -> None:
        """A response took the sender thread so long."""
        self._cost += (min(seconds, _MOST_COST) - self._cost) * _WEIGHT

    def due(self, stream: PacedStream, now: float) -> float | None:
        """When the stream should get its next response, in seconds of `time.monotonic()`; None: now."""
        if stream.num_new_tokens >= _MOST_TOKENS or now - stream.sent_time >= _EARLIEST * self.wait:
            return None
        return stream.sent_time + _LATEST * self.wait
