"""The engine's events about requests and steps, sent to one list of listeners.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.engine.deltas import SequenceDelta, StepStats, TokenColumns
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput, StepOutput

__all__ = ["DoneStep", "EngineListener", "receivers"]


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step after the scheduler received its tokens.

    Attributes:
        deltas, tokens: its output, see `Scheduler.update`.
        stats: the engine's state after it.
        start: seconds on the engine's clock when the scheduler began to make it; if it was launched ahead, when the
            device began it.
        end: when the scheduler had its tokens.
    """

    out: SchedulerOutput
    result: StepOutput
    deltas: Sequence[SequenceDelta]
    tokens: TokenColumns
    stats: StepStats
    start: float
    end: float


class EngineListener:
    """Receives the events in the order in which they happen.  Subclasses define the methods that they need.

    A listener changes no request and no block, and returns quickly: the engine waits for it.
    """

    def arrived(self, sequences: Sequence[Request]) -> None:
        """The sequences of a request are in the engine; a sequence that had already ended is left out."""

    def step_begins(self, running: Sequence[Request]) -> None:
        """The scheduler is about to make a step."""

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """The request has a slot and blocks; the prefix cache holds its first `num_cached_tokens` tokens.

        `request.num_computed_tokens` tokens need no computing: they are cached, or copied back from the host.
        """

    def left(self, request: Request) -> None:
        """The request no longer runs, but still has its slot and blocks: it ends next, or was preempted."""

    def ended(self, request: Request) -> None:
        """The request is FINISHED, whether it ever ran or not; its blocks are free again."""

    def step_made(self, out: SchedulerOutput) -> None:
        """The step is launched next."""

    def step_done(self, step: DoneStep) -> None:
        """The step has run."""

    def step_failed(self, step: DoneStep) -> None:
        """The step was not computed (`step.result.failure`), so its times mean nothing."""


def receivers(listeners: Sequence[EngineListener], event: str) -> list[Callable[..., Any]]:
    """The methods for `event` of the listeners that define it: the others need no call."""
    ignored = getattr(EngineListener, event)
    return [getattr(one, event) for one in listeners if getattr(type(one), event) is not ignored]
