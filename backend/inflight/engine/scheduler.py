"""Iteration-level scheduler: who gets how many tokens in the next forward pass.

After Orca (Yu et al., OSDI 2022) for iteration-level scheduling and Sarathi-Serve (Agrawal et
al., OSDI 2024, arXiv:2403.02310) for prefills cut into chunks under one token budget.  Pure
Python, no torch: tests and the simulator run this very code.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import SequenceDelta, TokenLogprobs
from inflight.engine.policy import Policies
from inflight.engine.request import FinishReason, Request, Status
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput
from inflight.engine.swap import SwapSpace

__all__ = ["Scheduler", "SchedulerLimits"]

_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED  # looked up for every row of every step
# Waiting requests that a budget may pass over in one step before no further one is looked at.
_LOOK_AHEAD = 16


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

    Steps are executed in the order in which they were made, and `update` takes them in in that
    order, but a step may be made while the one before it still runs:

        schedule(1)  schedule(2)  update(1)  schedule(3)  update(2) ...

    `num_computed_tokens` therefore counts what the steps *made* so far will have computed, and
    `num_pending_tokens` the tokens that they will have sampled and that nobody knows yet.  Blocks
    and slots go back as soon as a request ends: whoever gets them writes them in a later step.

    Nothing can deadlock: admission asks for the blocks of a whole prompt, the oldest running
    request may preempt every other, and the pool holds at least one request of
    `max_model_len` (the loader sees to that).
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: KVPool,
        policies: Policies | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.swap = swap if swap is not None else SwapSpace(0, pool.block_size)
        self.policies = policies if policies is not None else Policies()
        self.waiting = self.policies.order
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

        Running requests come first, in the order policy's order, then waiting ones while budget,
        slots and blocks last.  Every scheduled token has its block.
        """
        out = SchedulerOutput()
        self.policies.budget.begin(self.running)
        self.policies.admission.begin()
        if self.waiting.preempts:
            self._admit_urgent(out)
        urgent = list(out.requests)
        self._schedule_running(out)
        for request in urgent:  # they have their tokens of this step
            self.running.insert(self.waiting.position(request, self.running), request)
        if not out.preempted:  # else blocks are scarce: admitting now would preempt again
            self._admit_waiting(out)
        self.swap.send(out)
        return out

    def update(self, out: SchedulerOutput, step: StepOutput) -> list[SequenceDelta]:
        """Take in the step's tokens: append, stop, free.  One delta per sequence with news."""
        deltas: list[SequenceDelta] = []
        block_size, token_ids = self.pool.block_size, step.token_ids
        special = bool(step.logprobs or step.prompt_logprobs)
        finished = False
        rows = zip(out.requests, token_ids, out.num_computed_tokens, out.num_scheduled_tokens)
        for row, (request, token, computed, scheduled) in enumerate(rows):
            status = request.status
            if status is _FINISHED:
                continue  # ended while the step ran: its blocks are gone, its token is dropped
            computed += scheduled
            if computed % block_size < scheduled and request.caches_blocks and status is _RUNNING:
                self.pool.publish(request, computed)
            entries = self._new_prompt_logprobs(request, row, out, step) if special else None
            if token >= 0:  # whoever was preempted since gets it, too: it came of blocks that were whole
                request.token_ids.append(token)
                request.num_pending_tokens -= 1
                request.num_tokens = num_tokens = request.num_tokens + 1
                delta = SequenceDelta(request.request_id, request.index, [token])
                if num_tokens == request.num_prompt_tokens + 1:
                    self._first_token(request, delta)
                if token in request.stop_ids or num_tokens >= request.max_total_tokens:
                    self._last_token(request, delta)
                    finished = True
                if special:
                    delta.prompt_logprobs = entries
                    delta.logprobs = [step.logprobs[row]] if row in step.logprobs else None
                deltas.append(delta)
            elif entries is not None:
                deltas.append(SequenceDelta(request.request_id, request.index, [], prompt_logprobs=entries))
        if finished:
            self.running = [request for request in self.running if request.status is _RUNNING]
        return deltas

    def _admit_urgent(self, out: SchedulerOutput) -> None:
        """Admit those next in line that outrank running requests, before these get their tokens.

        Where room is lacking, those outranked are preempted for it.  One token is left to each running.
        """
        first = self.waiting.next_requests(1)
        if not first or self.waiting.outranked_by(first[0], self.running) is None:
            return  # the rule, and quickly found
        for request in self.waiting.next_requests(_LOOK_AHEAD):
            left = self.limits.max_num_batched_tokens - out.total_tokens
            if left <= 0 or self.waiting.outranked_by(request, self.running) is None:
                return
            prefix = self.pool.find_prefix(request)
            num_tokens = self._grant(request, prefix, max(1, left - len(self.running)))
            if num_tokens <= 0:
                continue  # nobody is preempted for a request that the budget passes over
            # What is behind it gives way to it also later, when blocks run out: the others must have room.
            ahead = [*out.requests, *self.running[: self.waiting.position(request, self.running)]]
            while not (self._free_slots and self.policies.admission.admits(request, prefix, ahead, self.pool)):
                victim = self.waiting.outranked_by(request, self.running)
                if victim is None:
                    return
                self._preempt(victim, out)
            self._admit(out, request, prefix, num_tokens)

    def _schedule_running(self, out: SchedulerOutput) -> None:
        """Give running requests their tokens, at least one to each that has one to compute.

        A request that lags by more than one token leaves one to each that runs behind it.
        """
        running, block_size = self.running, self.pool.block_size
        left = self.limits.max_num_batched_tokens - out.total_tokens
        decodes: list[Request] = []
        index = 0
        while index < len(running) and left > 0:
            request = running[index]
            computed = request.num_computed_tokens
            total = request.num_tokens + request.num_pending_tokens
            num_tokens = total - computed
            if num_tokens > 1:
                num_tokens = self._share(request, num_tokens, left, len(running) - index - 1)
            if total >= request.max_total_tokens or num_tokens <= 0:
                index += 1  # its last token is in flight, or the budget passes it over
                continue
            if computed + num_tokens > len(request.block_ids) * block_size:
                blocks = self._extend_or_preempt(index, computed + num_tokens, out)
                if blocks is None:
                    continue  # it was preempted itself: the next one stands at `index` now
                out.new_block_ids[request.slot] = blocks
            if computed + 1 == total:
                request.num_computed_tokens = total
                request.num_pending_tokens += 1
                decodes.append(request)
            else:
                out.append(request, num_tokens)
                if num_tokens > 1 and request.caches_blocks:
                    self.pool.publish(request, request.num_computed_tokens)
            left -= num_tokens
            index += 1
        out.put_first(decodes)

    def _share(self, request: Request, lag: int, left: int, behind: int) -> int:
        """Tokens for a running request that lags by `lag`, with `behind` running ones after it."""
        most = min(lag, max(1, left - behind))
        return self.policies.budget.grant(request, lag, most)

    def _extend_or_preempt(self, index: int, num_tokens: int, out: SchedulerOutput) -> list[int] | None:
        """Blocks for `running[index]` to hold `num_tokens`; preempts until there are enough.

        Victims are taken from `index` on: whoever is in the batch already stays in it.
        """
        request = self.running[index]
        while (blocks := self.pool.extend(request, num_tokens)) is None:
            victim = self.policies.victim(self.running[index:])
            self._preempt(victim, out)
            if victim is request:
                return None
        return blocks

    def _admit_waiting(self, out: SchedulerOutput) -> None:
        budget = self.limits.max_num_batched_tokens
        if not self._free_slots or not len(self.waiting):
            return
        passed_over = 0
        for request in self.waiting.next_requests(len(self._free_slots) + _LOOK_AHEAD):
            left = budget - out.total_tokens
            if left <= 0 or not self._free_slots:
                return
            prefix = self.pool.find_prefix(request)
            if not self.policies.admission.admits(request, prefix, self.running, self.pool):
                return  # nobody overtakes it: it would never find room
            num_tokens = self._grant(request, prefix, left)
            if num_tokens > 0:
                self._admit(out, request, prefix, num_tokens)
                self.running.insert(self.waiting.position(request, self.running), request)
            else:
                passed_over += 1
                if passed_over == _LOOK_AHEAD:
                    return

    def _grant(self, request: Request, prefix: list[int], left: int) -> int:
        """Tokens, up to `left`, with which the waiting `request` starts; 0 where the budget passes it over."""
        lag = request.num_tokens - self.swap.num_resumable(request, len(prefix))
        return self.policies.budget.grant(request, lag, min(lag, left))

    def _admit(self, out: SchedulerOutput, request: Request, prefix: list[int], num_tokens: int) -> None:
        """Give it slot, blocks and its tokens of this step; the caller puts it among the running."""
        self.waiting.remove(request)
        self.pool.admit(request, prefix)
        if request.num_preemptions:
            request.num_computed_tokens = self.swap.num_resumable(request, len(prefix))
        else:
            request.num_cached_tokens = request.num_computed_tokens
        blocks = self.pool.extend(request, request.num_computed_tokens + num_tokens)
        assert blocks is not None  # the admission policy saw room for all of it
        out.swap_in.update(zip(blocks, self.swap.swap_in(request, len(prefix))))
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        self.waiting.admitted(request)
        self.policies.admission.admitted(request, prefix, self.pool)
        row = NewRow(
            request.slot,
            list(request.token_ids),
            request.num_prompt_tokens,
            list(request.block_ids),
            request.params,
            request.seed,
        )
        out.new_rows.append(row)
        out.append(request, num_tokens)
        if request.caches_blocks:
            self.pool.publish(request, request.num_computed_tokens)

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        """Take slot and blocks; the tokens stay.  Their KV is computed again after readmission, or swapped."""
        self.running.remove(request)
        self.swap.swap_out(request, self.pool)
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preempted_total += 1
        out.preempted.append(request)
        self.waiting.add_first(request)

    def _first_token(self, request: Request, delta: SequenceDelta) -> None:
        delta.num_cached_tokens = request.num_cached_tokens
        for child in reversed(request.children):  # their prompt's blocks are computed now
            self.waiting.add_first(child)
        request.children = []

    def _last_token(self, request: Request, delta: SequenceDelta) -> None:
        (token,) = delta.token_ids
        if token in request.stop_ids:
            delta.finish_reason, delta.stop_token = "stop", token
            self._finish(request, FinishReason.STOP, keep_running_entry=True)
        else:
            delta.finish_reason = "length"
            self._finish(request, FinishReason.LENGTH, keep_running_entry=True)

    def _new_prompt_logprobs(
        self, request: Request, row: int, out: SchedulerOutput, step: StepOutput
    ) -> list[TokenLogprobs] | None:
        """Entries not delivered yet: a preempted request computes its prompt twice."""
        entries = step.prompt_logprobs.get(row)
        if entries is None:
            return None
        end = min(out.num_computed_tokens[row] + out.num_scheduled_tokens[row] + 1, request.num_prompt_tokens)
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
            self.swap.drop(request)
        if request.num_output_tokens:
            self.policies.admission.ended(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        for child in request.children:  # a leader that ends before its prompt is computed takes them along
            child.status = Status.FINISHED
            child.finish_reason = reason
        request.children = []

    def _release(self, request: Request) -> None:
        """What a running request holds goes back; it is WAITING or FINISHED next."""
        self.waiting.left(request)
        self.policies.admission.left(request)
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
        self.swap.check_integrity(self.waiting)
