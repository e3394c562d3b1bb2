"""The engine's events: what happens to requests and steps, told to one list of listeners.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.engine.messages import SequenceDelta, StepStats, TokenColumns
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput, StepOutput

__all__ = ["DoneStep", "EngineListener"]


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step whose tokens the scheduler has.

    Attributes:
        deltas, tokens: its output, see `Scheduler.update`.
        stats: the engine's state after it.
        start: seconds on the engine's clock when making it began; when the device began it, if it was launched ahead.
        end: when its tokens were known to the scheduler.
    """

    out: SchedulerOutput
    result: StepOutput
    deltas: Sequence[SequenceDelta]
    tokens: TokenColumns
    stats: StepStats
    start: float
    end: float


class EngineListener:
    """Is told what happens, in the order in which it happens.  Subclasses define the events that they need.

    A listener changes no request and no block, and returns quickly: every event is on the engine's path.
    """

    def arrived(self, sequences: Sequence[Request]) -> None:
        """The sequences of a request are in the engine; those that resume after their end are left out."""

    def step_begins(self, running: Sequence[Request]) -> None:
        """The scheduler is about to make a step."""

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """It has a slot and blocks; the prefix cache holds its first `num_cached_tokens` tokens.

        `request.num_computed_tokens` is what it need not compute: cached, or copied back from the host.
        """

    def left(self, request: Request) -> None:
        """It no longer runs, but still has its slot and blocks: it ends next, or was preempted."""

    def ended(self, request: Request) -> None:
        """It is FINISHED, whether it ever ran or not; its blocks are back."""

    def step_made(self, out: SchedulerOutput) -> None:
        """The step is launched next."""

    def step_done(self, step: DoneStep) -> None:
        """The step has run."""

    def step_failed(self, step: DoneStep) -> None:
        """The step was not computed (`step.result.failure`), so its times teach nothing."""
