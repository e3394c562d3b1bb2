"""Iteration-level scheduler: who gets how many tokens in the next forward pass.

After Orca (Yu et al., OSDI 2022) for iteration-level scheduling and Sarathi-Serve (Agrawal et
al., OSDI 2024, arXiv:2403.02310) for prefills cut into chunks under one token budget.  Pure
Python, no torch: tests and the simulator run this very code.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import SequenceDelta
from inflight.engine.policy import FcfsPolicy, Policy
from inflight.engine.request import FinishReason, Request, Status
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput

__all__ = ["Scheduler", "SchedulerLimits"]


@dataclass(frozen=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
        max_num_seqs: requests in a step, and rows in the runner's batch state.
        max_num_batched_tokens: tokens in a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Moves requests between waiting, running and finished; owns slots, shares the pool.

    Nothing can deadlock: admission asks for the blocks of a whole prompt, the oldest running
    request may preempt every other, and the pool holds at least one request of
    `max_model_len` (the loader sees to that).
    """

    def __init__(self, limits: SchedulerLimits, pool: KVPool, policy: Policy | None = None) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: Policy = policy if policy is not None else FcfsPolicy()
        self.running: list[Request] = []
        self.num_preempted_total = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, request: Request) -> None:
        """Queue a request.  It must fit `max_model_len`; the engine core checks that."""
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End a live request at once; what the step in flight makes of it is dropped by `update`."""
        self._finish(request, FinishReason.ABORT)

    def schedule(self) -> SchedulerOutput:
        """Form the next batch.

        Running requests come first, in the order of their admission, then waiting ones while
        budget, slots and blocks last.  Every scheduled token has its block.
        """
        out = SchedulerOutput()
        budget = self._schedule_running(out)
        if not out.preempted:  # else blocks are scarce: admitting now would preempt again
            self._admit_waiting(out, budget)
        return out

    def update(self, out: SchedulerOutput, step: StepOutput) -> list[SequenceDelta]:
        """Take in the step's tokens: append, stop, free.  One delta per sequence with news."""
        deltas: list[SequenceDelta] = []
        block_size = self.pool.block_size
        finished = False
        for row, request in enumerate(out.requests):
            if request.status is not Status.RUNNING:
                continue  # aborted while the step ran: its blocks are gone, its token is dropped
            scheduled = out.num_scheduled_tokens[row]
            request.num_computed_tokens += scheduled
            if request.caches_blocks and request.num_computed_tokens % block_size < scheduled:
                self.pool.publish(request)
            delta = self._take_token(request, row, step)
            if delta is not None:
                deltas.append(delta)
                finished = finished or request.status is Status.FINISHED
        if finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
        return deltas

    def _schedule_running(self, out: SchedulerOutput) -> int:
        """Give running requests their tokens; returns the budget left."""
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            computed = request.num_computed_tokens
            num_tokens = min(request.num_tokens - computed, budget)
            blocks = self._extend_or_preempt(index, computed + num_tokens, out)
            if blocks is None:
                continue  # it was preempted itself: the next one stands at `index` now
            if blocks:
                out.new_block_ids[request.slot] = blocks
            self._append(out, request, num_tokens)
            budget -= num_tokens
            index += 1
        return budget

    def _extend_or_preempt(self, index: int, num_tokens: int, out: SchedulerOutput) -> list[int] | None:
        """Blocks for `running[index]` to hold `num_tokens`; preempts until there are enough.

        Victims are taken from `index` on: whoever is in the batch already stays in it.
        """
        request = self.running[index]
        while (blocks := self.pool.extend(request, num_tokens)) is None:
            victim = self.waiting.victim(self.running[index:])
            self._preempt(victim, out)
            if victim is request:
                return None
        return blocks

    def _admit_waiting(self, out: SchedulerOutput, budget: int) -> None:
        while budget > 0 and self._free_slots and len(self.waiting):
            request = self.waiting.peek()
            prefix = self.pool.find_prefix(request)
            if not self.pool.can_admit(request, prefix):
                return
            self.waiting.remove(request)
            self.pool.admit(request, prefix)
            if not request.num_preemptions:
                request.num_cached_tokens = request.num_computed_tokens
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            blocks = self.pool.extend(request, request.num_computed_tokens + num_tokens)
            assert blocks is not None  # can_admit saw room for all of it
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            self.running.append(request)
            row = NewRow(
                request.slot,
                list(request.token_ids),
                request.num_prompt_tokens,
                list(request.block_ids),
                request.params,
                request.seed,
            )
            out.new_rows.append(row)
            self._append(out, request, num_tokens)
            budget -= num_tokens

    def _append(self, out: SchedulerOutput, request: Request, num_tokens: int) -> None:
        out.requests.append(request)
        out.slots.append(request.slot)
        out.num_scheduled_tokens.append(num_tokens)
        out.num_computed_tokens.append(request.num_computed_tokens)
        out.samples.append(request.num_computed_tokens + num_tokens == request.num_tokens)
        out.total_tokens += num_tokens

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        """Take slot and blocks; the tokens stay, and are computed again after readmission."""
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preempted_total += 1
        out.preempted.append(request)
        self.waiting.add_first(request)

    def _take_token(self, request: Request, row: int, step: StepOutput) -> SequenceDelta | None:
        prompt_logprobs = self._new_prompt_logprobs(request, row, step)
        token = step.token_ids[row]
        if token < 0:
            if prompt_logprobs is None:
                return None
            return SequenceDelta(request.request_id, request.index, [], prompt_logprobs=prompt_logprobs)
        request.token_ids.append(token)
        request.num_tokens += 1
        first = request.num_tokens == request.num_prompt_tokens + 1
        if first and request.children:
            for child in reversed(request.children):  # their prompt's blocks are published now
                self.waiting.add_first(child)
            request.children = []
        reason: str | None = None
        stop_token: int | None = None
        if token in request.stop_ids:
            reason, stop_token = "stop", token
            self._finish(request, FinishReason.STOP, keep_running_entry=True)
        elif request.num_tokens >= request.max_total_tokens:
            reason = "length"
            self._finish(request, FinishReason.LENGTH, keep_running_entry=True)
        logprobs = step.logprobs.get(row)
        return SequenceDelta(
            request.request_id,
            request.index,
            [token],
            reason,
            stop_token,
            None if logprobs is None else [logprobs],
            prompt_logprobs,
            request.num_cached_tokens if first else None,
        )

    def _new_prompt_logprobs(self, request: Request, row: int, step: StepOutput) -> list | None:
        """Entries not delivered yet: a preempted request computes its prompt twice."""
        entries = step.prompt_logprobs.get(row)
        if entries is None:
            return None
        end = min(request.num_computed_tokens + 1, request.num_prompt_tokens)
        start = end - len(entries)  # prompt index that entries[0] speaks of
        new = entries[max(0, request.num_prompt_logprobs - start) :]
        if request.num_prompt_logprobs == 0:
            new = [[], *new]  # nothing predicts the first token of a prompt
        request.num_prompt_logprobs = max(request.num_prompt_logprobs, end)
        return new or None

    def _finish(self, request: Request, reason: FinishReason, *, keep_running_entry: bool = False) -> None:
        """End a request from any state.  `update` sweeps `running` once, for all it finished."""
        if request.status is Status.RUNNING:
            if not keep_running_entry:
                self.running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING and request in self.waiting:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        for child in request.children:  # a leader that ends before its prompt is computed takes them along
            child.status = Status.FINISHED
            child.finish_reason = reason
        request.children = []

    def _release(self, request: Request) -> None:
        self.pool.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def check_integrity(self) -> None:
        """Assert that every request, slot and block is where its status says (invariants 1 to 3)."""
        live = [*self.running, *self.waiting]
        assert len(set(map(id, live))) == len(live), "a request is in two places"
        assert all(r.status is Status.RUNNING and r.slot >= 0 for r in self.running)
        assert all(r.status is Status.WAITING and r.slot < 0 and not r.block_ids for r in self.waiting)
        slots = [*self._free_slots, *(r.slot for r in self.running)]
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), "a slot is lost or held twice"
        self.pool.check_integrity(self.running)
