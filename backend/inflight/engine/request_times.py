"""When the sequences of traced requests began to run, and in how many steps they ran, for their spans.  No torch.

docs/operations/opentelemetry.md describes the spans.  The times travel with the first and the last delta of a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from inflight.config import EngineConfig
from inflight.engine.deltas import SequenceTimes
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput

__all__ = ["RequestTimes", "make_request_times"]


@dataclass(slots=True)
class _Sequence:
    """A sequence that has run: `SequenceTimes`, and where its output starts."""

    admitted: float
    num_prompt_tokens: int
    prefill_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0

    def times(self) -> SequenceTimes:
        return SequenceTimes(self.admitted, self.prefill_steps, self.decode_steps, self.preemptions)


class RequestTimes(EngineListener):
    """Adds `SequenceTimes` to the deltas of traced requests; requests that are not traced cost it nothing per step.

    Args:
        clock: seconds, the clock of arrivals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sequences: dict[tuple[int, int], _Sequence] = {}
        self._running: dict[int, _Sequence] = {}  # by slot
        self._ended: list[tuple[int, int]] = []  # their last delta comes with the step that is being taken in

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        if request.attached is None or not request.attached.traced:
            return
        key = request.request_id, request.index
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._sequences[key] = _Sequence(self._clock(), request.num_prompt_tokens)
        else:
            sequence.preemptions += 1
        self._running[request.slot] = sequence

    def left(self, request: Request) -> None:
        self._running.pop(request.slot, None)

    def ended(self, request: Request) -> None:
        key = request.request_id, request.index
        if key in self._sequences:
            self._ended.append(key)

    def step_made(self, out: SchedulerOutput) -> None:
        if not self._running:
            return
        for slot, num_computed in zip(out.slots, out.num_computed_tokens):
            sequence = self._running.get(slot)
            if sequence is not None:
                if num_computed < sequence.num_prompt_tokens:
                    sequence.prefill_steps += 1
                else:
                    sequence.decode_steps += 1

    def step_done(self, step: DoneStep) -> None:
        if self._sequences:
            for delta in step.deltas:
                if delta.num_cached_tokens is not None or delta.finish_reason is not None:
                    sequence = self._sequences.get((delta.request_id, delta.index))
                    delta.times = None if sequence is None else sequence.times()
        self._forget_ended()

    def step_failed(self, step: DoneStep) -> None:
        self._forget_ended()

    def _forget_ended(self) -> None:
        for key in self._ended:
            self._sequences.pop(key, None)
        self._ended.clear()


def make_request_times(config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> list[RequestTimes]:
    """The listener if spans are exported, else none."""
    return [RequestTimes(clock)] if config.otlp_traces_endpoint is not None else []
