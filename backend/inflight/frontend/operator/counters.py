"""Counts the outcomes of requests and engine processes, for operators' questions.  No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container

from inflight.engine.deltas import StepStats
from inflight.engine.messages import EngineReady, StepMessage
from inflight.frontend.output.interfaces import StatsSink
from inflight.frontend.output.request_state import RequestState

__all__ = ["Counters"]


class Counters:
    """A `StatsSink` that passes everything on to the metrics and keeps the sums.

    Attributes:
        requests: number of ended requests by ending: "finished", or one of `metric_specs.ENDINGS`.
        restarts, deaths: of engine processes.
        replays: requests that another engine process continued.
        generation_tokens: output tokens.
        last_step: state after the last step; None before the first.
        last_step_time: `time.monotonic()` of its arrival.
    """

    def __init__(self, metrics: StatsSink) -> None:
        self._metrics = metrics
        self.requests: Counter[str] = Counter()
        self.restarts = self.deaths = self.replays = self.generation_tokens = 0
        self.last_step: StepStats | None = None
        self.last_step_time = 0.0
        self.settle = metrics.settle
        self.first_token = metrics.first_token

    def step(self, message: StepMessage, received: float, open_ids: Container[int]) -> None:
        self.last_step, self.last_step_time = message.stats, received
        self.generation_tokens += message.num_tokens
        self._metrics.step(message, received, open_ids)

    def engine_ready(self, ready: EngineReady, again: bool) -> None:
        self.restarts += again
        self._metrics.engine_ready(ready, again)

    def engine_down(self) -> None:
        self.deaths += 1
        self._metrics.engine_down()

    def resubmitted(self, count: int) -> None:
        self.replays += count
        self._metrics.resubmitted(count)

    def finished(self, stream: RequestState) -> None:
        self.requests["finished"] += 1
        self._metrics.finished(stream)

    def unsuccessful(self, ending: str, stream: RequestState | None = None) -> None:
        self.requests[ending] += 1
        self._metrics.unsuccessful(ending, stream)

    def seconds_since_step(self) -> float | None:
        """Seconds since the last step; None before the first."""
        return None if self.last_step is None else time.monotonic() - self.last_step_time
