"""EngineCore: the body of the step loop, without processes, pipes or Triton."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from inflight.config import EngineConfig
from inflight.engine.host_swap import SwapSpace
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import (
    AddRequest,
    RequestFailed,
    SequenceDelta,
    StepMessage,
    StepStats,
    TokenColumns,
)
from inflight.engine.policies.load_shedding import Shedding, tokens_of_a_row
from inflight.engine.policies.selection import make_policies
from inflight.engine.queue_limits import QueueCaps
from inflight.engine.request import Request, Status
from inflight.engine.request_factory import ModelInfo, make_sequences, refusal
from inflight.engine.scheduler import Scheduler, SchedulerLimits
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.step_trace import StepTrace

__all__ = ["EngineCore", "ModelInfo", "Runner"]


class Runner(Protocol):
    """Owns the device: turns batches into tokens, in the order in which they are launched.

    It may count, in `num_collected_first`, launches that had to wait for the tokens of the step before, and have a
    `draft_runner` (engine/drafting/draft_model.py).
    """

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded checkpoint."""

    def launch(self, out: SchedulerOutput) -> Any:
        """Start a step, which may wait for those before it on the device; its ticket goes to `collect`."""

    def collect(self, ticket: Any) -> StepOutput:
        """Wait for the tokens of the oldest step that was launched and not collected."""


class _Launched(NamedTuple):
    """A step that was launched and not collected.

    Attributes:
        start: `clock()` when making it began.
        ahead: it was made while the step before it ran.
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
        clock: seconds now, on the clock of deadlines, arrivals and the runner's times.
    """

    def __init__(self, config: EngineConfig, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.runner = runner
        self.info = runner.info
        self.clock = clock
        self.pool = KVPool(self.info.num_blocks, config.block_size)
        self.swap = SwapSpace(
            self.info.num_host_blocks, config.block_size, self.info.swap_seconds_per_block, config.preemption_mode
        )
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens)
        policies = make_policies(config, clock, self.info.grammars, getattr(runner, "draft_runner", None))
        self.scheduler = Scheduler(limits, self.pool, policies, self.swap, clock)
        self.caps = QueueCaps(config)
        self.shedding = Shedding(config, self.scheduler, clock)
        self.trace = self._make_trace()
        self._live: dict[int, list[Request]] = {}
        # Launch-ahead: step n + 1 is made and launched before step n is collected.
        self._max_launched = 2 if config.async_scheduling else 1
        self._launched: deque[_Launched] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do."""
        return bool(self._launched) or self.scheduler.has_work

    @property
    def live_ids(self) -> Collection[int]:
        """Ids of the requests that have not ended, as they are at any time."""
        return self._live.keys()

    @property
    def only_holds(self) -> bool:
        """Whether all that is left waits for something outside of the engine: steps do nothing until it comes."""
        scheduler = self.scheduler
        return bool(scheduler.held) and not (self._launched or scheduler.running or len(scheduler.waiting))

    def add_request(self, message: AddRequest) -> RequestFailed | None:
        """Queue a request; its n sequences are counted one by one.

        Returns:
            None, or why the request is not taken (INVALID_ARG, or UNAVAILABLE when the queue is
            full); then nothing has changed.
        """
        failure = refusal(message, self.info, self.pool)
        if failure is not None:
            return failure
        sequences = make_sequences(message, self.info, self.config.enable_prefix_caching, self.clock)
        live = [request for request in sequences if request.status is Status.WAITING]
        failure = self.shedding.refusal(live, self.caps.refusal(live, self.scheduler.running))
        if failure is not None and not message.replayed:
            return failure
        leader, *leader.children = live
        self._live[message.request_id] = sequences
        self.caps.arrived(live)
        self.scheduler.add(leader)
        if self.trace is not None:
            self.trace.arrived(live)
        return None

    def abort(self, request_id: int, index: int | None = None) -> None:
        """End a request, or one of its sequences; unknown and ended ones are ignored."""
        sequences = self._live.get(request_id, [])
        live = [request for request in sequences if request.status is not Status.FINISHED]
        if index is None:
            # A leader takes along the children that still wait for its prompt.
            for request in sequences:
                if request.status is not Status.FINISHED:
                    self.scheduler.abort(request)
        elif index < len(sequences) and sequences[index].status is not Status.FINISHED:
            self.scheduler.abort(sequences[index])
        self.caps.ended([request for request in live if request.status is Status.FINISHED])
        if self.trace is not None:
            self.trace.ended(sequences, self.clock())
        self._forget_if_done(request_id)

    def step(self) -> StepMessage:
        """Schedule, launch, collect, update.  A step that schedules nothing returns no deltas.

        With `async_scheduling` the next step is launched before this one is collected; a request that ends
        with this one's tokens then wastes one row.
        """
        while len(self._launched) < self._max_launched:
            start = self.clock()
            out = self.scheduler.schedule()
            if not out.slots:
                break
            ticket = self.runner.launch(out)
            self._launched.append(_Launched(out, ticket, start, ahead=bool(self._launched)))
        if not self._launched:
            return StepMessage([], self.stats(SchedulerOutput(), 0.0), failed=self._give_up())
        step = self._launched.popleft()
        result = self.runner.collect(step.ticket)
        news, tokens = self.scheduler.update(step.out, result)
        return self._account(step, result, news, tokens)

    def _account(
        self, step: _Launched, result: StepOutput, news: list[SequenceDelta], tokens: TokenColumns
    ) -> StepMessage:
        """Tell the policies and the trace what the step took, and the frontend what it brought."""
        ended = [self._live[delta.request_id][delta.index] for delta in news if delta.finish_reason is not None]
        self.caps.ended(ended)
        end = self.clock()
        start = result.started if step.ahead else step.start
        if not result.failure:
            # Whoever waits for the step waits for making it, too.
            self.scheduler.policies.budget.observe(step.out, result.ended - start)
            self.swap.observe(step.out, result.ended - result.started)
            self.shedding.observe(step.out, start, end, tokens_of_a_row(news, tokens))
        stats = self.stats(step.out, end - start)
        if self.trace is not None:
            self.trace.add(step.out, result, stats, (start, end))
            self.trace.ended(ended, end)
        for request in ended:
            self._forget_if_done(request.request_id)
        failed = self._give_up()
        if failed:  # their blocks are back
            stats = self.stats(step.out, end - start)
        return StepMessage(news, stats, tokens, failed)

    def _give_up(self) -> list[RequestFailed]:
        """End the requests that the scheduler cannot go on with, each with all its sequences."""
        failed = []
        lost, self.scheduler.failed = self.scheduler.failed, []
        for failure in lost:
            if failure.request_id in self._live:  # else it went with a sibling
                self.abort(failure.request_id)
                failed.append(failure)
        return failed

    def stats(self, out: SchedulerOutput, seconds: float) -> StepStats:
        """The state after a step that took `seconds`."""
        scheduler, pool = self.scheduler, self.pool
        return StepStats(
            running=len(scheduler.running),
            waiting=self.caps.num_live - len(scheduler.running),
            preempted_total=scheduler.num_preempted_total,
            blocks_used=pool.num_used,
            blocks_free=pool.num_available,
            prefix_queries_total=pool.num_prefix_queries,
            prefix_hits_total=pool.num_prefix_hits,
            prompt_tokens=out.num_prompt_tokens,
            batch_size=len(out.slots),
            scheduled_tokens=out.num_tokens,
            step_seconds=seconds,
            host_blocks_used=self.swap.num_used,
            swapped_out_total=self.swap.num_swapped_out,
            swapped_in_total=self.swap.num_swapped_in,
            collected_first_total=getattr(self.runner, "num_collected_first", 0),
            draft_totals=scheduler.policies.draft_counts.totals(),
        )

    def _make_trace(self) -> StepTrace | None:
        config = self.config
        if not config.num_traced_steps:
            return None
        return StepTrace(
            config.num_traced_steps,
            model=config.model,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=self.info.num_blocks,
        )

    def _forget_if_done(self, request_id: int) -> None:
        if all(request.status is Status.FINISHED for request in self._live.get(request_id, ())):
            self._live.pop(request_id, None)

    def check_integrity(self) -> None:
        """Assert the invariants over all live requests; when idle, that every block came back."""
        self.scheduler.check_integrity()
        live = [
            request for of_one in self._live.values() for request in of_one if request.status is not Status.FINISHED
        ]
        assert self.caps.num_live == len(live), "a sequence that arrived or ended is not counted"
        if not self.has_work:
            assert not self._live, "a request is remembered that no queue holds"
            assert self.pool.num_used == 0, "an idle engine owns blocks"
            assert self.swap.num_used == 0, "an idle engine holds host blocks"
