"""EngineCore: the body of the step loop, without processes, pipes or Triton."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

from inflight.config import EngineConfig
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats, TokenColumns
from inflight.engine.drafting.draft_model import DraftRunner
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.messages import AddRequest, StepMessage
from inflight.engine.policies.base import ArrivalPolicy
from inflight.engine.queue_limits import QueueLimits
from inflight.engine.request import Request, Status
from inflight.engine.request_factory import ModelInfo, make_sequences, refusal
from inflight.engine.scheduler import Scheduler
from inflight.engine.stats import step_stats
from inflight.engine.step import SchedulerOutput, StepOutput

__all__ = ["EngineCore", "EngineParts", "ModelInfo", "Runner"]


class Runner(Protocol):
    """Owns the device: turns batches into tokens, in the order in which they are launched."""

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded checkpoint."""

    @property
    def draft_runner(self) -> DraftRunner | None:
        """Runs the draft model; None: there is none."""

    @property
    def num_collected_first(self) -> int:
        """Launches so far that had to wait for the tokens of the previous step."""

    def launch(self, out: SchedulerOutput) -> Any:
        """Start a step, which can wait for earlier steps on the device; its ticket goes to `collect`."""

    def collect(self, ticket: Any) -> StepOutput:
        """Wait for the tokens of the oldest step that was launched and not collected."""


class EngineParts(NamedTuple):
    """The parts of the core; `engine/assembly.py` builds them from the options.

    Attributes:
        limits: how many sequences may wait.
        shedding: asked about a request after `limits`.
    """

    scheduler: Scheduler
    limits: QueueLimits
    shedding: ArrivalPolicy


class _Launched(NamedTuple):
    """A step that was launched and not collected.

    Attributes:
        start: `clock()` when the scheduler began to make it.
        ahead: it was made while the previous step ran.
    """

    out: SchedulerOutput
    ticket: Any
    start: float
    ahead: bool


class EngineCore:
    """Requests in, token deltas out, one forward pass per `step()`.

    Args:
        config: engine options.
        runner: the device side, with the checkpoint loaded.
        parts: made for this runner.
        clock: seconds now, on the clock of deadlines, arrivals and the runner's times.
        listeners: receive the engine's events, after the engine's own listeners.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        parts: EngineParts,
        clock: Callable[[], float] = time.monotonic,
        listeners: Iterable[EngineListener] = (),
    ) -> None:
        self.config = config
        self.runner = runner
        self.info = runner.info
        self.clock = clock
        self.scheduler, self.limits, self.shedding = parts
        self.pool = self.scheduler.pool
        self.scheduler.listen(listeners)
        self.listeners = self.scheduler.listeners
        self._live: dict[int, list[Request]] = {}
        # Launch-ahead: step n + 1 is made and launched before step n is collected.
        self._max_launched = 2 if config.launches_ahead else 1
        self._launched: deque[_Launched] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do."""
        return bool(self._launched) or self.scheduler.has_work

    @property
    def live_ids(self) -> Collection[int]:
        """A live view of the ids of the requests that have not ended."""
        return self._live.keys()

    @property
    def only_holds(self) -> bool:
        """Whether all requests wait for something outside the engine: until it arrives, steps do nothing."""
        scheduler = self.scheduler
        return bool(scheduler.held) and not (self._launched or scheduler.running or len(scheduler.waiting))

    def add_request(self, message: AddRequest) -> RequestFailed | None:
        """Queue a request; its n sequences are counted one by one.

        Returns:
            None, or why the request is refused (INVALID_ARG, or UNAVAILABLE when the queue is
            full); then nothing has changed.
        """
        failure = refusal(message, self.info, self.pool)
        if failure is not None:
            return failure
        sequences = make_sequences(message, self.info, self.config.enable_prefix_caching, self.clock)
        live = [request for request in sequences if request.status is Status.WAITING]
        failure = self.shedding.refusal(live, self.limits.refusal(live, self.scheduler.running))
        if failure is not None and not message.replayed:
            return failure
        leader, *leader.children = live
        self._live[message.request_id] = sequences
        for listener in self.listeners:
            listener.arrived(live)
        self.scheduler.add(leader)
        return None

    def abort(self, request_id: int, index: int | None = None) -> None:
        """End a request, or one of its sequences; unknown and ended requests are ignored."""
        for request in self._live.get(request_id, []):
            # Aborting a leader also aborts the children that still wait for its prompt.
            if request.status is not Status.FINISHED and index in (None, request.index):
                self.scheduler.abort(request)
        self._forget_if_done(request_id)

    def step(self) -> StepMessage:
        """Schedule, launch, collect, update.  A step that schedules nothing returns no deltas.

        With `async_scheduling` the next step is launched before this one is collected; a request that ends
        with the tokens of this step then wastes one row.
        """
        while len(self._launched) < self._max_launched:
            start = self.clock()
            out = self.scheduler.schedule()
            if not out.slots:
                break
            for listener in self.listeners:
                listener.step_made(out)
            ticket = self.runner.launch(out)
            self._launched.append(_Launched(out, ticket, start, ahead=bool(self._launched)))
        if not self._launched:
            return StepMessage([], self.stats(SchedulerOutput(), 0.0), failed=self._give_up())
        step = self._launched.popleft()
        result = self.runner.collect(step.ticket)
        deltas, tokens = self.scheduler.update(step.out, result)
        return self._report(step, result, deltas, tokens)

    def _report(
        self, step: _Launched, result: StepOutput, deltas: list[SequenceDelta], tokens: TokenColumns
    ) -> StepMessage:
        """Report the step's cost to the listeners, and its output to the frontend."""
        start, end = result.started if step.ahead else step.start, self.clock()
        stats = self.stats(step.out, end - start)
        done = DoneStep(step.out, result, deltas, tokens, stats, start, end)
        for listener in self.listeners:
            (listener.step_failed if result.failure else listener.step_done)(done)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._forget_if_done(delta.request_id)
        failed = self._give_up()
        if failed:  # their blocks are free again
            stats = self.stats(step.out, end - start)
        return StepMessage(deltas, stats, tokens, failed)

    def _give_up(self) -> list[RequestFailed]:
        """End the requests that the scheduler cannot continue, each with all its sequences."""
        failed = []
        lost, self.scheduler.failed = self.scheduler.failed, []
        for failure in lost:
            if failure.request_id in self._live:  # else it ended with a sibling
                self.abort(failure.request_id)
                failed.append(failure)
        return failed

    def _forget_if_done(self, request_id: int) -> None:
        if all(request.status is Status.FINISHED for request in self._live.get(request_id, ())):
            self._live.pop(request_id, None)

    def stats(self, out: SchedulerOutput, seconds: float) -> StepStats:
        """The state after the step `out`, which took `seconds`."""
        return step_stats(self.scheduler, self.limits, self.runner.num_collected_first, out, seconds)
