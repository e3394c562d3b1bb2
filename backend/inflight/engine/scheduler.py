"""Iteration-level scheduler: who gets how many tokens in the next forward pass.

After Orca (Yu et al., OSDI 2022) for iteration-level scheduling and Sarathi-Serve (Agrawal et
al., OSDI 2024, arXiv:2403.02310) for prefills cut into chunks under one token budget.  Pure
Python, no torch: tests and the simulator run this very code.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import SequenceDelta, TokenColumns, TokenLogprobs
from inflight.engine.policies.base import Policies
from inflight.engine.request import FinishReason, Request, Status
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput
from inflight.engine.swap import SwapSpace

__all__ = ["Scheduler", "SchedulerLimits"]

_WAITING, _RUNNING, _FINISHED = Status.WAITING, Status.RUNNING, Status.FINISHED  # members are slow to look up
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
    `num_total_tokens` also the tokens that they will have sampled and that nobody knows yet.  Blocks
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

    def update(self, out: SchedulerOutput, step: StepOutput) -> tuple[list[SequenceDelta], TokenColumns]:
        """Take in the step's tokens: append, stop, free.

        Returns:
            A delta of each sequence with more news than a token, and the tokens of the others.
        """
        news: list[SequenceDelta] = []
        request_ids: list[int] = []
        indices: list[int] = []
        token_ids: list[int] = []
        finished = False
        for request, token in zip(out.requests, step.token_ids):
            # A request that ended while the step ran has no blocks, and its token is dropped.  Whoever was
            # preempted since gets it: it came of blocks that were whole.
            if token < 0 or request.status is _FINISHED:
                continue
            request.token_ids.append(token)
            request.num_tokens = num_tokens = request.num_tokens + 1
            if num_tokens >= request.milestone or token in request.stop_ids:
                delta = SequenceDelta(request.request_id, request.index, [token])
                news.append(delta)
                finished |= self._pass_milestone(request, token, delta)
            else:
                request_ids.append(request.request_id)
                indices.append(request.index)
                token_ids.append(token)
        if step.logprobs or step.prompt_logprobs:
            self._add_logprobs(news, out, step)
        if finished:
            self.running = [request for request in self.running if request.status is _RUNNING]
        return news, TokenColumns(request_ids, indices, token_ids)

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
        left = self.limits.max_num_batched_tokens - out.total_tokens
        decodes: list[Request] = []
        positions: list[int] = []
        for request in self.running.copy():  # some may be preempted on the way
            if left <= 0:
                break
            computed = request.num_computed_tokens
            num_tokens = lag = request.num_total_tokens - computed
            if lag > 1 or computed >= request.num_computable_tokens:
                num_tokens = self._make_room(request, lag, left, out)
            if lag == num_tokens == 1:
                request.num_computed_tokens = computed + 1
                request.num_total_tokens = computed + 2
                decodes.append(request)
                positions.append(computed)
            elif num_tokens > 0:
                self._append(out, request, num_tokens)
            left -= num_tokens
        out.put_first(decodes, positions)

    def _make_room(self, request: Request, lag: int, left: int, out: SchedulerOutput) -> int:
        """Tokens that a request of `running` gets of the `lag` ones it is behind; there are blocks for them then."""
        if request.status is not _RUNNING:
            return 0  # preempted for one ahead of it
        if request.num_computed_tokens + lag >= request.max_total_tokens:
            return 0  # its last token is in flight
        num_tokens = lag
        if lag > 1:
            behind = len(self.running) - self.running.index(request) - 1
            num_tokens = self.policies.budget.grant(request, lag, min(lag, max(1, left - behind)))
            if num_tokens <= 0:
                return 0
        end = request.num_computed_tokens + num_tokens
        if end > request.num_computable_tokens:
            blocks = self._extend_or_preempt(request, end, out)
            if blocks is None:
                return 0
            out.new_block_ids[request.slot] = blocks
        return num_tokens

    def _extend_or_preempt(self, request: Request, num_tokens: int, out: SchedulerOutput) -> list[int] | None:
        """Blocks for a request of `running` to hold `num_tokens`; preempts until there are enough, or itself.

        Victims are those from it on: whoever is in the batch already stays in it.
        """
        while (blocks := self.pool.extend(request, num_tokens)) is None:
            victim = self.policies.victim(self.running[self.running.index(request) :])
            self._preempt(victim, out)
            if victim is request:
                return None
        return blocks

    def _append(self, out: SchedulerOutput, request: Request, num_tokens: int) -> None:
        """Schedule tokens of a prompt, or all that were computed once before; whoever comes next may share them."""
        out.append(request, num_tokens)
        self._publish(request)

    def _publish(self, request: Request) -> None:
        """Let the prefix cache know of what the steps made so far compute of a request."""
        if request.caches_blocks:
            self.pool.publish(request, request.num_computed_tokens)

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
        request.status = _RUNNING
        self.waiting.admitted(request)
        self.policies.admission.admitted(request, prefix, self.pool)
        row = NewRow(
            request.slot,
            request.token_ids[:],
            request.num_prompt_tokens,
            list(request.block_ids),
            request.params,
            request.seed,
        )
        out.new_rows.append(row)
        self._append(out, request, num_tokens)

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        """Take slot and blocks; the tokens stay.  Their KV is computed again after readmission, or swapped."""
        self.running.remove(request)
        self.swap.swap_out(request, self.pool)
        self._release(request)
        request.status = _WAITING
        request.num_preemptions += 1
        self.num_preempted_total += 1
        out.preempted.append(request)
        self.waiting.add_first(request)

    def _pass_milestone(self, request: Request, token: int, delta: SequenceDelta) -> bool:
        """Tell of its first token, or its last: whether it ended."""
        if request.num_tokens == request.num_prompt_tokens + 1:
            if request.params.logprobs is None:
                request.milestone = request.max_total_tokens
            delta.num_cached_tokens = request.num_cached_tokens
            for child in reversed(request.children):  # their prompt's blocks are computed now
                self.waiting.add_first(child)
            request.children = []
        if token in request.stop_ids:
            delta.finish_reason, delta.stop_token = "stop", token
            self._finish(request, FinishReason.STOP, keep_running_entry=True)
        elif request.num_tokens >= request.max_total_tokens:
            delta.finish_reason = "length"
            self._finish(request, FinishReason.LENGTH, keep_running_entry=True)
        return request.status is _FINISHED

    def _add_logprobs(self, news: list[SequenceDelta], out: SchedulerOutput, step: StepOutput) -> None:
        """Put the step's log probabilities into the deltas of their sequences; one without a token gets a delta."""
        delta_of = {(delta.request_id, delta.index): delta for delta in news}
        for row in step.logprobs.keys() | step.prompt_logprobs.keys():
            request = out.requests[row]
            delta = delta_of.get((request.request_id, request.index))
            if delta is None:
                if request.status is _FINISHED:
                    continue  # ended while the step ran
                delta = SequenceDelta(request.request_id, request.index, [])
            delta.prompt_logprobs = self._new_prompt_logprobs(request, row, out, step)
            if delta.token_ids:
                delta.logprobs = [step.logprobs[row]] if row in step.logprobs else None
            elif delta.prompt_logprobs is not None:
                news.append(delta)

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
        if request.status is _RUNNING:
            if not keep_running_entry:
                self.running.remove(request)
            self._release(request)
        elif request.status is _WAITING and request in self.waiting:
            self.waiting.remove(request)
            self.swap.drop(request)
        if request.num_output_tokens:
            self.policies.admission.ended(request)
        request.status = _FINISHED
        request.finish_reason = reason
        for child in request.children:  # a leader that ends before its prompt is computed takes them along
            child.status = _FINISHED
            child.finish_reason = reason
        request.children = []

    def _release(self, request: Request) -> None:
        """What a running request holds goes back; it is WAITING or FINISHED next."""
        self._publish(request)
        self.waiting.left(request)
        self.policies.admission.left(request)
        self.pool.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def check_integrity(self) -> None:
        """Assert that every request, slot and block is where its status says (invariants 1 to 3)."""
        live = [*self.running, *self.waiting]
        assert len(set(map(id, live))) == len(live), "a request is in two places"
        assert all(r.status is _RUNNING and r.slot >= 0 for r in self.running)
        assert all(r.status is _WAITING and r.slot < 0 and not r.block_ids for r in self.waiting)
        slots = [*self._free_slots, *(r.slot for r in self.running)]
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), "a slot is lost or held twice"
        self.pool.check_integrity(self.running)
        self.swap.check_integrity(self.waiting)
