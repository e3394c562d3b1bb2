"""EngineCore: the step loop's body, without processes, pipes or Triton."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from inflight.config import EngineConfig
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import AddRequest, RequestFailed, SequenceDelta, StepMessage, StepStats
from inflight.engine.policies.selection import make_policies
from inflight.engine.request import Request, Status
from inflight.engine.scheduler import Scheduler, SchedulerLimits
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.step_trace import StepTrace
from inflight.engine.swap import SwapSpace

__all__ = ["EngineCore", "ModelInfo", "Runner"]

_MASK64 = 2**64 - 1


class ModelInfo(Protocol):
    """What the core must know of the loaded checkpoint."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    num_host_blocks: int
    swap_seconds_per_block: float


class Runner(Protocol):
    """Owns the device: turns a batch into tokens."""

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded checkpoint."""

    def prepare(self, out: SchedulerOutput) -> Any:
        """What can be made ready before the step before has run; goes to `execute`.

        Called once a step, in the order of the steps, maybe while `execute` runs in another thread.
        """

    def execute(self, out: SchedulerOutput, prepared: Any) -> StepOutput:
        """Run one forward pass over the batch and sample the rows that are due.

        Called once a step, in the order of the steps, always from the same thread.
        """


@dataclass(slots=True)
class _Step:
    """A step that was made and is, or will be, executed.

    Attributes:
        start: `_clock()` when making it began.
        scheduled: when it was made, or None where that took no time of the step's: it was made
            while the step before ran.
        result: of `_execute`.
    """

    out: SchedulerOutput
    start: float
    scheduled: float | None
    result: Callable[[], tuple[StepOutput, float, float]]


def sequence_seed(seed: int, index: int) -> int:
    """64-bit seed of the `index`-th sequence of a request; the first one keeps the request's.

    The mixing is SplitMix64's finaliser (Steele et al., OOPSLA 2014), so that neighbouring
    seeds and indices give unrelated noise.
    """
    if index == 0:
        return seed & _MASK64
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


class EngineCore:
    """Requests in, token deltas out, one forward pass per `step()`.

    Args:
        config: engine options.
        runner: the device side, with the checkpoint loaded.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config = config
        self.runner = runner
        self.info = runner.info
        self.pool = KVPool(self.info.num_blocks, config.block_size)
        self.swap = SwapSpace(
            self.info.num_host_blocks, config.block_size, self.info.swap_seconds_per_block, config.preemption_mode
        )
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens)
        self.scheduler = Scheduler(limits, self.pool, make_policies(config), self.swap)
        self.trace = self._make_trace()
        self._live: dict[int, list[Request]] = {}
        # One thread executes, so that steps run in the order in which they were made.
        self._device = ThreadPoolExecutor(1, "device") if config.async_scheduling else None
        self._in_flight: _Step | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do."""
        return self._in_flight is not None or self.scheduler.has_work

    def add_request(self, message: AddRequest) -> RequestFailed | None:
        """Queue a request; its n sequences are counted one by one.

        Returns:
            None, or why the request is not taken (INVALID_ARG, or UNAVAILABLE when the queue is
            full); then nothing has changed.
        """
        failure = self._refusal(message)
        if failure is not None:
            return failure
        params = message.params
        stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.info.eos_token_ids)
        limit = min(len(message.prompt_token_ids) + params.max_tokens, self.info.max_model_len)
        arrival = self._clock() if message.arrival is None else message.arrival
        # n > 1 shares the prompt's blocks through the prefix cache; where that is off, under a
        # salt of the request's own.
        caches = self.config.enable_prefix_caching
        sequences = [
            Request(
                message.request_id,
                message.prompt_token_ids,
                params,
                index=index,
                arrival_time=arrival,
                priority=message.priority,
                tenant=message.tenant,
                deadline=message.deadline,
                cache_salt=message.cache_salt if caches else f"request {message.request_id}",
                caches_blocks=caches or params.n > 1,
                seed=sequence_seed(params.seed or 0, index),
                stop_ids=stop_ids,
                max_total_tokens=limit,
            )
            for index in range(params.n)
        ]
        free = self.config.max_num_seqs - len(self.scheduler.running)
        refusal = self.scheduler.waiting.refusal(sequences[0], free)
        if refusal is not None:
            return RequestFailed(message.request_id, "UNAVAILABLE", refusal)
        sequences[0].children = sequences[1:]
        self._live[message.request_id] = sequences
        self.scheduler.add(sequences[0])
        if self.trace is not None:
            self.trace.arrived(sequences)
        return None

    def abort(self, request_id: int, index: int | None = None) -> None:
        """End a request, or one of its sequences; unknown and ended ones are ignored."""
        sequences = self._live.get(request_id, [])
        if index is None:
            # A leader takes along the children that still wait for its prompt.
            for request in sequences:
                if request.status is not Status.FINISHED:
                    self.scheduler.abort(request)
        elif index < len(sequences) and sequences[index].status is not Status.FINISHED:
            self.scheduler.abort(sequences[index])
        if self.trace is not None:
            self.trace.ended(sequences, self._clock())
        self._forget_if_done(request_id)

    def step(self) -> StepMessage:
        """Schedule, execute, update.  A step that schedules nothing returns no deltas.

        With `async_scheduling` the step after this one is made, and queued behind it, before this
        one's tokens are there; a request that they end computes one row in vain.
        """
        step, self._in_flight = self._in_flight or self._make(behind=None), None
        if self._device is not None:
            following = self._make(behind=step)
            self._in_flight = following if following.out.requests else None
        result, begun, executed = step.result()
        news, tokens = self.scheduler.update(step.out, result)
        self._forget_finished(news)
        end = self._clock()
        start, scheduled = (begun, begun) if step.scheduled is None else (step.start, step.scheduled)
        if step.out.requests:
            self.scheduler.policies.budget.observe(step.out, executed - start)  # whoever waits, waits for both
            self.swap.observe(step.out, executed - begun)
        message = StepMessage(news, self._stats(step.out, end - start), tokens)
        if self.trace is not None:
            self.trace.add(step.out, result, message.stats, (start, scheduled, executed, end))
        return message

    def _make(self, behind: _Step | None) -> _Step:
        """Schedule and prepare the next step and hand it to the device, behind the one that runs."""
        start = self._clock()
        out = self.scheduler.schedule()
        prepared = self.runner.prepare(out) if out.requests else None
        scheduled = self._clock()
        if self._device is None or not out.requests:
            return _Step(out, start, scheduled, partial(self._execute, out, prepared, scheduled))
        future = self._device.submit(self._execute, out, prepared)
        return _Step(out, start, scheduled if behind is None else None, future.result)

    def _clock(self) -> float:
        """Seconds now, on the clock of deadlines and arrivals."""
        return time.monotonic()

    def _execute(
        self, out: SchedulerOutput, prepared: Any, begun: float | None = None
    ) -> tuple[StepOutput, float, float]:
        """The step's tokens, and `_clock()` before (`begun`, where that is known) and after."""
        begun = self._clock() if begun is None else begun
        result = self.runner.execute(out, prepared) if out.requests else StepOutput([])
        return result, begun, self._clock()

    def _refusal(self, message: AddRequest) -> RequestFailed | None:
        num_tokens = len(message.prompt_token_ids)
        limit = self.info.max_model_len
        if not num_tokens:
            return RequestFailed(message.request_id, "INVALID_ARG", "the prompt is empty: give at least one token")
        if num_tokens >= limit:
            text = f"the prompt has {num_tokens} tokens: at most {limit - 1} fit max_model_len={limit} with one output"
            return RequestFailed(message.request_id, "INVALID_ARG", text)
        low, high = min(message.prompt_token_ids), max(message.prompt_token_ids)
        if low < 0 or high >= self.info.vocab_size:
            bad = low if low < 0 else high
            text = f"input_ids: token id {bad} is not in the vocabulary [0, {self.info.vocab_size - 1}]"
            return RequestFailed(message.request_id, "INVALID_ARG", text)
        try:
            message.params.validate(vocab_size=self.info.vocab_size)
        except ValueError as error:
            return RequestFailed(message.request_id, "INVALID_ARG", str(error))
        total = min(num_tokens + message.params.max_tokens, limit)  # of each of its n sequences
        need, there = self.pool.blocks_for(total), self.pool.num_blocks
        if need > there:
            text = (
                f"the request never fits: {num_tokens} prompt and up to {total - num_tokens} output tokens take "
                f"{need} KV blocks of {self.config.block_size} tokens, and the pool has {there}; lower max_tokens "
                "or the prompt, or raise kv_cache_memory"
            )
            return RequestFailed(message.request_id, "INVALID_ARG", text)
        most = self.config.max_queue_size
        # Sequences that a step could take at once are not in anybody's way.
        free = self.config.max_num_seqs - len(self.scheduler.running)
        if most and len(self.scheduler.waiting) - free >= most:
            text = f"the queue is full: max_queue_size={most} sequences are waiting; try again later"
            return RequestFailed(message.request_id, "UNAVAILABLE", text)
        return None

    def _stats(self, out: SchedulerOutput, seconds: float) -> StepStats:
        scheduler, pool = self.scheduler, self.pool
        prompt_tokens = sum(
            max(0, min(computed + n, request.num_prompt_tokens) - computed)
            for request, computed, n in zip(out.requests, out.num_computed_tokens, out.num_scheduled_tokens)
            if computed < request.num_prompt_tokens
        )
        return StepStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted_total=scheduler.num_preempted_total,
            blocks_used=pool.num_used,
            blocks_free=pool.num_available,
            prefix_queries_total=pool.num_prefix_queries,
            prefix_hits_total=pool.num_prefix_hits,
            prompt_tokens=prompt_tokens,
            batch_size=len(out.requests),
            scheduled_tokens=out.total_tokens,
            step_seconds=seconds,
            host_blocks_used=self.swap.num_used,
            swapped_out_total=self.swap.num_swapped_out,
            swapped_in_total=self.swap.num_swapped_in,
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

    def _forget_finished(self, news: list[SequenceDelta]) -> None:
        for delta in news:
            if delta.finish_reason is not None:
                self._forget_if_done(delta.request_id)

    def _forget_if_done(self, request_id: int) -> None:
        if all(request.status is Status.FINISHED for request in self._live.get(request_id, ())):
            self._live.pop(request_id, None)

    def check_integrity(self) -> None:
        """Assert the invariants over all live requests; when idle, that every block came back."""
        self.scheduler.check_integrity()
        if not self.has_work:
            assert not self._live, "a request is remembered that no queue holds"
            assert self.pool.num_used == 0, "an idle engine owns blocks"
            assert self.swap.num_used == 0, "an idle engine holds host blocks"
