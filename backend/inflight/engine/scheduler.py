"""Iteration-level scheduler: how many tokens each request gets in the next forward pass.

After Orca (Yu et al., OSDI 2022) for iteration-level scheduling and Sarathi-Serve (Agrawal et al., OSDI 2024,
arXiv:2403.02310) for prefills cut into chunks under one token budget.  Pure Python, no torch: tests and
the simulator run this very code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from inflight.engine.delta_logprobs import add_results
from inflight.engine.deltas import RequestFailed, SequenceDelta, TokenColumns
from inflight.engine.drafting.drafter import Drafter
from inflight.engine.events import EngineListener, receivers
from inflight.engine.held_requests import HeldRequests
from inflight.engine.host_swap import SwapSpace
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import BudgetPolicy, NotYet, Policies, UrgencyPolicy
from inflight.engine.request import FinishReason, Request, Status
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.step_failures import lost_requests

__all__ = ["Scheduler", "SchedulerLimits"]

_WAITING, _RUNNING, _FINISHED = Status.WAITING, Status.RUNNING, Status.FINISHED  # members are slow to look up
# Waiting requests that the budget may pass over in one step before the scheduler stops looking.
_LOOK_AHEAD = 16


class SchedulerLimits(NamedTuple):
    """The most requests (and slots in the runner's batch state) and tokens of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Moves requests between waiting, running and finished; owns slots, shares the pool.

    Steps run and are updated in the order in which they are made; a step may be made while the previous one runs:

        schedule(1)  schedule(2)  update(1)  schedule(3)  update(2) ...

    `num_computed_tokens` therefore counts the tokens that the steps *made* so far compute, and `num_total_tokens`
    includes the unknown tokens that they are certain to sample.  A row with drafts yields an uncertain number of
    tokens, so its request sits out the next step.  Blocks and slots return as soon as a request ends: their next
    owner writes them in a later step.

    No deadlock is possible: admission asks for the blocks of a whole prompt, the oldest running request may
    preempt every other, and the pool holds at least one request of `max_model_len` (checked at load).

    Args:
        clock: seconds, for the deadlines of requests that are held back.

    Attributes:
        listeners: receive each event; see `listen`.
        held: requests for which admission answered "not yet".
        failed: requests that cannot continue, possibly one entry per sequence; the engine core ends them and clears it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: KVPool,
        policies: Policies,
        swap: SwapSpace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.pool, self.policies, self.waiting = limits, pool, policies, policies.order
        self.swap = swap if swap is not None else SwapSpace(0, pool.block_size)
        self.listeners: list[EngineListener] = []
        self.listen([self.swap, *policies.listeners])
        self.running: list[Request] = []
        self.held = HeldRequests(self.waiting, clock)
        self.failed: list[RequestFailed] = []
        self.num_preempted_total = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._rows: list[Request] = []  # of the step that is being made
        self._in_flight: deque[list[Request]] = deque()  # rows of the steps not updated yet
        self._num_kept_blocks: dict[int, int] = {}  # for the next step: slot -> blocks left after a cut

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.held)

    def listen(self, listeners: Iterable[EngineListener]) -> None:
        """Add listeners; the events of a request reach only listeners that define them."""
        self.listeners += listeners
        self._admitted, self._left, self._ended = (receivers(self.listeners, e) for e in ("admitted", "left", "ended"))

    def add(self, request: Request) -> None:
        """Queue a request.  It must fit `max_model_len`; the engine core checks that."""
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End a live request immediately; `update` drops its tokens of the steps in flight."""
        if request.status is _RUNNING:
            self.running.remove(request)
        self._finish(request, FinishReason.ABORT)

    def schedule(self) -> SchedulerOutput:
        """Form the next batch.

        Running requests come first, in the order policy's order, then waiting ones while budget, slots and
        blocks last, then drafts.  Every scheduled token has its block.
        """
        out, self._rows = SchedulerOutput(), []
        for listener in self.listeners:
            listener.step_begins(self.running)
        if self.held:
            self.failed += self.held.recall(lambda r: self._admission(r, self.pool.find_prefix(r), self.running))
        if self.policies.urgency is not None:
            self._admit_urgent(out, self.policies.urgency)
        urgent = self._rows.copy()
        self._schedule_running(out)
        for request in urgent:  # they already have their tokens of this step
            self.running.insert(self.waiting.position(request, self.running), request)
        if not out.preempted:  # else blocks are scarce: admitting now would preempt again
            self._admit_waiting(out)
        if self.policies.drafter is not None and self.policies.drafter.active:
            self._add_drafts(out, self.policies.drafter)
        self.swap.send(out)
        if out.slots:  # else it does not run, and the changes for the runner wait for the next step
            self._in_flight.append(self._rows)
            out.num_kept_blocks, self._num_kept_blocks = self._num_kept_blocks, {}
        return out

    def update(self, out: SchedulerOutput, step: StepOutput) -> tuple[list[SequenceDelta], TokenColumns]:
        """Append the tokens of the oldest step in flight; end the requests that they complete.

        Returns:
            A full delta of each sequence with more output than one token, and the tokens of the others.
        """
        rows = self._in_flight.popleft() if out.slots else []
        if step.failure or step.row_failures:
            self.failed += lost_requests(out, step, rows, self.running, self.pool)
        deltas: list[SequenceDelta] = []
        columns: tuple[list[int], list[int], list[int]] = [], [], []
        request_ids, indices, token_ids = columns
        for request, token in zip(rows, step.token_ids):
            # A request that ended while the step ran has no blocks, and its token is dropped.  A request preempted
            # since then gets its token: it was sampled from intact blocks.
            if token < 0 or request.status is _FINISHED:
                continue
            request.token_ids.append(token)
            request.num_tokens = num_tokens = request.num_tokens + 1
            if num_tokens >= request.full_delta_at or token in request.stop_ids:
                deltas.append(self._full_delta(request, [token]))
            else:
                request_ids.append(request.request_id)
                indices.append(request.index)
                token_ids.append(token)
        for row, tokens in step.token_runs.items():
            if rows[row].status is not _FINISHED:
                deltas.append(self._take_run(rows[row], tokens, len(out.draft_token_ids[row])))
        if step.logprobs or step.prompt_logprobs or step.pooled:
            add_results(deltas, rows, out, step)
        if any(delta.finish_reason is not None for delta in deltas):
            self.running = [request for request in self.running if request.status is _RUNNING]
        return deltas, TokenColumns(*columns)

    def _admission(self, request: Request, prefix: Sequence[int], beside: Sequence[Request]) -> bool | NotYet:
        """Admission's answer beside these running requests; a yes needs a free slot, too."""
        answer = self.policies.admission.admits(request, prefix, beside, self.pool)
        return answer if isinstance(answer, NotYet) else answer and bool(self._free_slots)

    def _admit_urgent(self, out: SchedulerOutput, urgency: UrgencyPolicy) -> None:
        """Admit urgent requests before the running ones get their tokens; leave one token to each of these."""
        for request in urgency.next_requests(self.running):
            left = self.limits.max_num_batched_tokens - out.num_tokens
            if left <= 0:
                return
            prefix = self.pool.find_prefix(request)
            num_tokens = self._grant(urgency, request, prefix, max(1, left - len(self.running)))
            if num_tokens <= 0:
                continue  # no request is preempted for one that the budget passes over
            # Requests behind it give way to it also later, when blocks run out: the others must have room.
            beside = [*self._rows, *self.running[: self.waiting.position(request, self.running)]]
            answer = self._admission(request, prefix, beside)
            giving_way = [] if answer else list(urgency.giving_way(request, prefix, beside, self.running, self.pool))
            while not answer and giving_way:
                self._preempt(giving_way.pop(0), out)
                answer = self._admission(request, prefix, beside)
            if not answer:
                return
            if not isinstance(answer, NotYet):
                self._admit(out, request, prefix, num_tokens)
            elif not self.held.hold(request, answer):
                return

    def _schedule_running(self, out: SchedulerOutput) -> None:
        """Give tokens to the running requests that the turn policy selects: one or more to each with tokens to compute.

        A request with more than one token to compute leaves one to each running request behind it.
        """
        left = self.limits.max_num_batched_tokens - out.num_tokens
        decodes: list[Request] = []
        positions: list[int] = []
        for request in self.policies.turns.take(self.running):  # some may be preempted on the way
            if left <= 0:
                break
            computed = request.num_computed_tokens
            num_tokens = missing = request.num_total_tokens - computed
            if missing > 1 or computed >= request.num_computable_tokens:
                num_tokens = self._make_room(request, missing, left, out)
            if missing == num_tokens == 1:
                request.num_computed_tokens = computed + 1
                request.num_total_tokens = computed + 2
                decodes.append(request)
                positions.append(computed)
            elif num_tokens > 0:
                self._append(out, request, num_tokens)
            left -= num_tokens
        self._rows[:0] = decodes
        out.prepend_decodes([request.slot for request in decodes], positions)

    def _make_room(self, request: Request, missing: int, left: int, out: SchedulerOutput) -> int:
        """How many of its `missing` tokens a request of `running` gets; allocates the blocks for them."""
        if request.status is not _RUNNING:
            return 0  # preempted for a request ahead of it
        if request.num_computed_tokens + missing >= request.max_total_tokens:
            return 0  # its last token is in flight
        num_tokens = missing
        if missing > 1:
            behind = len(self.running) - self.running.index(request) - 1
            limit = min(missing, max(1, left - behind))
            num_tokens = self.policies.budget.grant(request, missing, limit)
            if num_tokens <= 0:
                return 0
        end = request.num_computed_tokens + num_tokens
        if end <= request.num_computable_tokens:
            return num_tokens
        while (blocks := self.pool.extend(request, end)) is None:
            # Requests ahead of it are in the batch already, and stay in it.
            victim = self.policies.victim(self.running[self.running.index(request) :])
            self._preempt(victim, out)
            if victim is request:
                return 0
        out.new_block_ids[request.slot] = blocks
        return num_tokens

    def _append(self, out: SchedulerOutput, request: Request, num_tokens: int) -> None:
        """Schedule `num_tokens` tokens of a request that has their blocks; later requests can share these."""
        computed = request.num_computed_tokens
        end = request.num_computed_tokens = computed + num_tokens
        samples = end == request.num_total_tokens
        if samples:
            request.num_total_tokens += 1
        self._rows.append(request)
        out.append(request.slot, num_tokens, computed, samples)
        out.num_prompt_tokens += max(0, min(end, request.num_prompt_tokens) - computed)
        self.pool.publish(request, request.num_computed_tokens)

    def _admit_waiting(self, out: SchedulerOutput) -> None:
        if not self._free_slots or not len(self.waiting):
            return
        passed_over = 0
        for request in self.waiting.next_requests(len(self._free_slots) + _LOOK_AHEAD):
            left = self.limits.max_num_batched_tokens - out.num_tokens
            if left <= 0 or not self._free_slots:
                return
            prefix = self.pool.find_prefix(request)
            answer = self._admission(request, prefix, self.running)
            if isinstance(answer, NotYet) and self.held.hold(request, answer):
                continue
            if answer is not True:
                return  # no request overtakes it, else it might never find room
            num_tokens = self._grant(self.policies.budget, request, prefix, left)
            if num_tokens > 0:
                self._admit(out, request, prefix, num_tokens)
                self.running.insert(self.waiting.position(request, self.running), request)
            elif (passed_over := passed_over + 1) == _LOOK_AHEAD:
                return

    def _grant(self, budget: BudgetPolicy, request: Request, prefix: list[int], left: int) -> int:
        """Tokens, up to `left`, with which the waiting `request` starts; 0 if the budget passes it over."""
        missing = request.num_tokens - self.swap.num_resumable(request, len(prefix))
        return budget.grant(request, missing, min(missing, left))

    def _admit(self, out: SchedulerOutput, request: Request, prefix: list[int], num_tokens: int) -> None:
        """Give a request its slot, blocks and tokens of this step; the caller adds it to `running`."""
        self.waiting.remove(request)
        self.pool.admit(request, prefix)
        request.num_computed_tokens = self.swap.num_resumable(request, len(prefix))
        if not request.num_preemptions:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = self.pool.extend(request, request.num_computed_tokens + num_tokens)
        assert blocks is not None  # the admission policy saw room for all of it
        out.swap_in.update(zip(blocks, self.swap.swap_in(request, len(prefix))))
        request.slot = self._free_slots.pop()
        request.status = _RUNNING
        for admitted in self._admitted:
            admitted(request, len(prefix) * self.pool.block_size)
        out.new_rows.append(request.new_row())
        self._append(out, request, num_tokens)

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        """Take a request's slot and blocks; it keeps its tokens, whose KV is computed again later, or swapped."""
        self.running.remove(request)
        # Drafts in flight are not its tokens yet.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self.swap.swap_out(request, self.pool)
        out.preempted.append(request.slot)
        self._release(request)
        request.status = _WAITING
        request.num_preemptions += 1
        self.num_preempted_total += 1
        self.waiting.add_first(request)

    def _add_drafts(self, out: SchedulerOutput, drafter: Drafter) -> None:
        """Let rows that sample verify drafts, with the tokens and blocks that the step has left.

        No request gives way to a draft, and no draft is longer than the rest of the request's output.
        """
        for row, request in enumerate(self._rows):
            total = request.num_total_tokens
            limit = min(self.limits.max_num_batched_tokens - out.num_tokens, request.max_total_tokens - total)
            if limit <= 0 or not out.samples[row]:
                continue
            drafts = list(drafter.propose(request, total - 1 - request.num_tokens, limit))[:limit]
            computed = request.num_computed_tokens
            if computed + len(drafts) > request.num_computable_tokens:
                blocks = self.pool.extend(request, computed + len(drafts))
                if blocks is None:
                    del drafts[request.num_computable_tokens - computed :]
                else:
                    out.new_block_ids[request.slot] = [*out.new_block_ids.get(request.slot, ()), *blocks]
            if drafts:
                out.draft_token_ids[row] = drafts
                out.num_scheduled_tokens[row] += len(drafts)
                out.num_tokens += len(drafts)
                request.num_computed_tokens = request.num_total_tokens = computed + len(drafts)

    def _take_run(self, request: Request, tokens: Sequence[int], num_drafts: int) -> SequenceDelta:
        """Append the tokens of a row with drafts, up to the one that ends the request; drop the rest."""
        ends = (i for i, token in enumerate(tokens, 1) if request.ends_with(token, request.num_tokens + i) is not None)
        taken = list(tokens[: next(ends, len(tokens))])
        request.token_ids.extend(taken)
        request.num_tokens += len(taken)
        request.num_total_tokens = request.num_tokens
        if request.status is _RUNNING:  # else it was preempted since then, and has nothing computed
            request.num_computed_tokens = request.num_tokens - 1
            if self.pool.truncate(request, request.num_tokens):
                self._num_kept_blocks[request.slot] = len(request.block_ids)
        assert self.policies.drafter is not None
        self.policies.drafter.observe(request, num_drafts, len(tokens) - 1)
        return self._full_delta(request, taken)

    def _full_delta(self, request: Request, tokens: list[int]) -> SequenceDelta:
        """The delta of a request that began, ended, or got several tokens."""
        delta = SequenceDelta(request.request_id, request.index, tokens)
        if request.full_delta_at == request.num_given_tokens + 1:  # its first tokens
            wants_all = request.params.logprobs is not None
            request.full_delta_at = request.full_delta_at + 1 if wants_all else request.max_total_tokens
            delta.num_cached_tokens = request.num_cached_tokens
            for child in reversed(request.children):  # their prompt's blocks are computed now
                if child.status is _WAITING:
                    self.waiting.add_first(child)
            request.children = []
        if (reason := request.ends_with(tokens[-1], request.num_tokens)) is not None:
            delta.finish_reason = reason.value
            delta.stop_token = tokens[-1] if reason is FinishReason.STOP else None
            self._finish(request, reason)
        return delta

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from any state; the caller removes it from `running`, as `update` does once for all."""
        if request.status is _RUNNING:
            self._release(request)
        elif request in self.held:
            self.held.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        # A leader that ends before its prompt is computed ends its children, too.
        children, request.children = request.children, []
        for sequence in (request, *[child for child in children if child.status is _WAITING]):
            sequence.status, sequence.finish_reason = _FINISHED, reason
            for ended in self._ended:
                ended(sequence)

    def _release(self, request: Request) -> None:
        """Free the slot and blocks of a running request, which is WAITING or FINISHED next."""
        self.pool.publish(request, request.num_computed_tokens)
        for left in self._left:
            left(request)
        self.pool.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1
