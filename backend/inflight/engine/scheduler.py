"""Iteration-level scheduler: who gets how many tokens in the next forward pass.

After Orca (Yu et al., OSDI 2022) for iteration-level scheduling and Sarathi-Serve (Agrawal et al., OSDI 2024,
arXiv:2403.02310) for prefills cut into chunks under one token budget.  Pure Python, no torch: tests and
the simulator run this very code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.engine.delta_logprobs import add_logprobs
from inflight.engine.drafting.safe_drafter import observed, proposed
from inflight.engine.held_requests import HeldRequests
from inflight.engine.host_swap import SwapSpace
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import RequestFailed, SequenceDelta, TokenColumns
from inflight.engine.policies.base import NotYet, Policies
from inflight.engine.pool_without import PoolWithout
from inflight.engine.request import FinishReason, Request, Status
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput
from inflight.engine.step_failures import lost_requests

__all__ = ["Scheduler", "SchedulerLimits"]

_WAITING, _RUNNING, _FINISHED = Status.WAITING, Status.RUNNING, Status.FINISHED  # members are slow to look up
# Waiting requests that a budget may pass over in one step before no further one is looked at.
_LOOK_AHEAD = 16


@dataclass(frozen=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
        max_num_seqs: requests in a step, and slots in the runner's batch state.
        max_num_batched_tokens: tokens in a step.
        max_num_held: requests that may wait for something outside of the engine while others pass them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_held: int = 256


class Scheduler:
    """Moves requests between waiting, running and finished; owns slots, shares the pool.

    Steps run in the order in which they were made, and `update` takes them in in that order, but a step
    may be made while the one before it still runs:

        schedule(1)  schedule(2)  update(1)  schedule(3)  update(2) ...

    `num_computed_tokens` therefore counts what the steps *made* so far will have computed, and
    `num_total_tokens` also the tokens that they are certain to sample and that nobody knows yet.  How many
    tokens a row with drafts yields is uncertain, so a request with drafts in flight sits out the next step.
    Blocks and slots return as soon as a request ends: whoever gets them writes them in a later step.

    Nothing can deadlock: admission asks for the blocks of a whole prompt, the oldest running request may
    preempt every other, and the pool holds at least one request of `max_model_len` (checked at load).

    Args:
        clock: seconds, for the deadlines of requests that are held back.

    Attributes:
        held: requests whose admission answered "not yet".
        failed: requests that cannot go on, maybe one for each sequence; who ends them clears it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: KVPool,
        policies: Policies | None = None,
        swap: SwapSpace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.swap = swap if swap is not None else SwapSpace(0, pool.block_size)
        self.policies = policies if policies is not None else Policies()
        self.waiting = self.policies.order
        self.running: list[Request] = []
        self.held = HeldRequests(limits.max_num_held, clock)
        self.failed: list[RequestFailed] = []
        self.num_preempted_total = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._rows: list[Request] = []  # of the step that is being made
        self._in_flight: deque[list[Request]] = deque()  # the rows of the steps made and not taken in yet
        self._num_kept_blocks: dict[int, int] = {}  # for the next step: slots whose block table was cut

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.held)

    def add(self, request: Request) -> None:
        """Queue a request.  It must fit `max_model_len`; the engine core checks that."""
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End a live request at once; what the step in flight makes of it is dropped by `update`."""
        self._finish(request, FinishReason.ABORT)

    def schedule(self) -> SchedulerOutput:
        """Form the next batch.

        Running requests come first, in the order policy's order, then waiting ones while budget, slots and
        blocks last, then drafts.  Every scheduled token has its block.
        """
        out, self._rows = SchedulerOutput(), []
        self.policies.budget.begin(self.running)
        self.policies.admission.begin()
        if self.held:
            self._recall_held()
        if self.waiting.preempts:
            self._admit_urgent(out)
        urgent = self._rows.copy()
        self._schedule_running(out)
        for request in urgent:  # they have their tokens of this step
            self.running.insert(self.waiting.position(request, self.running), request)
        if not out.preempted:  # else blocks are scarce: admitting now would preempt again
            self._admit_waiting(out)
        if self.policies.drafter is not None and self.policies.drafter.active:
            self._add_drafts(out)
        self._close(out)
        return out

    def update(self, out: SchedulerOutput, step: StepOutput) -> tuple[list[SequenceDelta], TokenColumns]:
        """Take in the tokens of the oldest step in flight: append, stop, free.

        Returns:
            A full delta of each sequence with more news than a token, and the tokens of the others.
        """
        rows = self._in_flight.popleft() if out.slots else []
        if step.failure or step.row_failures:
            self.failed += lost_requests(out, step, rows, self.running, self.pool)
        news: list[SequenceDelta] = []
        request_ids: list[int] = []
        indices: list[int] = []
        token_ids: list[int] = []
        for request, token in zip(rows, step.token_ids):
            # A request that ended while the step ran has no blocks, and its token is dropped.  One that was
            # preempted since gets it: it was sampled from blocks that were whole.
            if token < 0 or request.status is _FINISHED:
                continue
            request.token_ids.append(token)
            request.num_tokens = num_tokens = request.num_tokens + 1
            if num_tokens >= request.full_delta_at or token in request.stop_ids:
                news.append(self._full_delta(request, [token]))
            else:
                request_ids.append(request.request_id)
                indices.append(request.index)
                token_ids.append(token)
        for row, tokens in step.token_runs.items():
            if rows[row].status is not _FINISHED:
                news.append(self._take_run(rows[row], tokens, len(out.draft_token_ids[row])))
        if step.logprobs or step.prompt_logprobs:
            add_logprobs(news, rows, out, step)
        if any(delta.finish_reason is not None for delta in news):
            self.running = [request for request in self.running if request.status is _RUNNING]
        return news, TokenColumns(request_ids, indices, token_ids)

    # -- making a step ---------------------------------------------------------------------

    def _recall_held(self) -> None:
        """Put held requests that need not wait any longer back in line; give up those that waited too long."""

        def admits(request: Request) -> bool | NotYet:
            return self.policies.admission.admits(request, self.pool.find_prefix(request), self.running, self.pool)

        ready, failed = self.held.recall(admits)
        for request in reversed(ready):  # each goes to the front of the queue
            self.waiting.add_first(request)
        self.failed += failed

    def _hold(self, request: Request, answer: NotYet) -> bool:
        """Take a request out of the queue, so that others pass it; False where no more may be held."""
        if len(self.held) >= self.held.limit:
            return False
        self.waiting.remove(request)
        self.held.hold(request, answer)
        return True

    def _admission(self, request: Request, prefix: Sequence[int], running: Sequence[Request]) -> bool | NotYet:
        """Admission's answer; a yes takes a free slot, too."""
        answer = self.policies.admission.admits(request, prefix, running, self.pool)
        return answer if isinstance(answer, NotYet) else answer and bool(self._free_slots)

    def _admit_urgent(self, out: SchedulerOutput) -> None:
        """Admit those next in line that outrank running requests, before these get their tokens.

        Where room is lacking, those outranked are preempted for it, if that makes enough.  One token is left to
        each running.
        """
        line = self.waiting.next_requests(1)
        if not line or next(self.waiting.outranked(line[0], self.running), None) is None:
            return  # the usual case, and quickly found
        for request in self.waiting.next_requests(_LOOK_AHEAD):
            left = self.limits.max_num_batched_tokens - out.num_tokens
            victims = self.waiting.outranked(request, self.running)
            if left <= 0 or (first := next(victims, None)) is None:
                return
            prefix = self.pool.find_prefix(request)
            num_tokens = self._grant(request, prefix, max(1, left - len(self.running)))
            if num_tokens <= 0:
                continue  # nobody is preempted for a request that the budget passes over
            # What is behind it gives way to it also later, when blocks run out: the others must have room.
            ahead = [*self._rows, *self.running[: self.waiting.position(request, self.running)]]
            answer = self._admission(request, prefix, ahead)
            if not answer:
                giving_way = [first]  # one is enough, as a rule
                if not self._suffices(request, prefix, ahead, giving_way):
                    giving_way.extend(victims)
                    if not self._suffices(request, prefix, ahead, giving_way):
                        return
                while not answer and giving_way:
                    self._preempt(giving_way.pop(0), out)
                    answer = self._admission(request, prefix, ahead)
                if not answer:
                    return
            if not isinstance(answer, NotYet):
                self._admit(out, request, prefix, num_tokens)
            elif not self._hold(request, answer):
                return

    def _suffices(
        self, request: Request, prefix: Sequence[int], ahead: Sequence[Request], victims: Sequence[Request]
    ) -> bool:
        """Whether there would be room for `request` if `victims` gave way; their slots are enough in any case."""
        rest = PoolWithout(self.pool, victims)
        return self.policies.admission.admits(request, prefix, ahead, rest) is True

    def _schedule_running(self, out: SchedulerOutput) -> None:
        """Give running requests whose turn it is their tokens, at least one to each that has one to compute.

        A request with more than one token to compute leaves one to each that runs behind it.
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
        self._prepend_decodes(out, decodes, positions)

    def _prepend_decodes(self, out: SchedulerOutput, decodes: list[Request], positions: list[int]) -> None:
        """Schedule one token, which samples, of each, ahead of all other rows; their counts are past it."""
        self._rows[:0] = decodes
        out.slots[:0] = [request.slot for request in decodes]
        out.num_computed_tokens[:0] = positions
        out.num_scheduled_tokens[:0] = [1] * len(decodes)
        out.samples[:0] = [True] * len(decodes)
        out.num_tokens += len(decodes)

    def _make_room(self, request: Request, missing: int, left: int, out: SchedulerOutput) -> int:
        """Tokens that a request of `running` gets of the `missing` ones; there are blocks for them then."""
        if request.status is not _RUNNING:
            return 0  # preempted for one ahead of it
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
        """Schedule the next `num_tokens` tokens of a request that holds their blocks: of its prompt, or tokens
        that were computed once before.  Whoever comes next may share them."""
        computed = request.num_computed_tokens
        end = request.num_computed_tokens = computed + num_tokens
        samples = end == request.num_total_tokens
        if samples:
            request.num_total_tokens += 1
        self._rows.append(request)
        out.slots.append(request.slot)
        out.num_scheduled_tokens.append(num_tokens)
        out.num_computed_tokens.append(computed)
        out.samples.append(samples)
        out.num_tokens += num_tokens
        out.num_prompt_tokens += max(0, min(end, request.num_prompt_tokens) - computed)
        self._publish(request)

    def _publish(self, request: Request) -> None:
        """Add to the prefix cache what the steps made so far compute of a request."""
        if request.caches_blocks:
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
            if isinstance(answer, NotYet) and self._hold(request, answer):
                continue
            if answer is not True:
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
        missing = request.num_tokens - self.swap.num_resumable(request, len(prefix))
        return self.policies.budget.grant(request, missing, min(missing, left))

    def _admit(self, out: SchedulerOutput, request: Request, prefix: list[int], num_tokens: int) -> None:
        """Give it slot, blocks and its tokens of this step; the caller puts it among the running."""
        self.waiting.remove(request)
        self.pool.admit(request, prefix)
        if request.num_preemptions:
            request.num_computed_tokens = self.swap.num_resumable(request, len(prefix))
        else:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = self.pool.extend(request, request.num_computed_tokens + num_tokens)
        assert blocks is not None  # the admission policy saw room for all of it
        out.swap_in.update(zip(blocks, self.swap.swap_in(request, len(prefix))))
        request.slot = self._free_slots.pop()
        request.status = _RUNNING
        request.held_until = None
        self.waiting.admitted(request)
        self.policies.admission.admitted(request, prefix, self.pool)
        row = NewRow(
            request.slot,
            request.request_id,
            request.index,
            request.token_ids.tobytes(),
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
        # Drafts in flight are not its tokens yet.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self.swap.swap_out(request, self.pool)
        out.preempted.append(request.slot)
        self._release(request)
        request.status = _WAITING
        request.num_preemptions += 1
        self.num_preempted_total += 1
        self.waiting.add_first(request)

    def _add_drafts(self, out: SchedulerOutput) -> None:
        """Let rows that sample verify drafts, with the tokens and blocks that the step has left.

        Nobody gives way to a draft, and no draft is longer than what the request may still yield.
        """
        drafter = self.policies.drafter
        assert drafter is not None
        for row, request in enumerate(self._rows):
            total = request.num_total_tokens
            limit = min(self.limits.max_num_batched_tokens - out.num_tokens, request.max_total_tokens - total)
            if limit <= 0 or not out.samples[row]:
                continue
            drafts = proposed(drafter, request, total - 1 - request.num_tokens, limit)
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

    def _close(self, out: SchedulerOutput) -> None:
        """Send what the runner must know.  A step without rows does not run, and its news wait for the next one."""
        self.swap.send(out)
        if not out.slots:
            return
        self._in_flight.append(self._rows)
        if self._num_kept_blocks:
            out.num_kept_blocks, self._num_kept_blocks = self._num_kept_blocks, {}

    # -- taking a step in ------------------------------------------------------------------

    def _take_run(self, request: Request, tokens: Sequence[int], num_drafts: int) -> SequenceDelta:
        """Append the tokens of a row with drafts, up to the one that ends the request; take back the rest."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in request.stop_ids or request.num_tokens + len(taken) >= request.max_total_tokens:
                break
        request.token_ids.extend(taken)
        request.num_tokens += len(taken)
        request.num_total_tokens = request.num_tokens
        if request.status is _RUNNING:  # else it was preempted since, and has nothing computed
            request.num_computed_tokens = request.num_tokens - 1
            if self.pool.truncate(request, request.num_tokens):
                self._num_kept_blocks[request.slot] = len(request.block_ids)
        assert self.policies.drafter is not None
        observed(self.policies.drafter, request, num_drafts, len(tokens) - 1)
        return self._full_delta(request, taken)

    def _full_delta(self, request: Request, tokens: list[int]) -> SequenceDelta:
        """News of a request beyond one more token: it began, it ended, or it got several."""
        delta = SequenceDelta(request.request_id, request.index, tokens)
        if request.full_delta_at == request.num_given_tokens + 1:  # its first tokens
            wants_all = request.params.logprobs is not None
            request.full_delta_at = request.full_delta_at + 1 if wants_all else request.max_total_tokens
            delta.num_cached_tokens = request.num_cached_tokens
            for child in reversed(request.children):  # their prompt's blocks are computed now
                self.waiting.add_first(child)
            request.children = []
        if tokens[-1] in request.stop_ids:
            delta.finish_reason, delta.stop_token = "stop", tokens[-1]
            self._finish(request, FinishReason.STOP, keep_running_entry=True)
        elif request.num_tokens >= request.max_total_tokens:
            delta.finish_reason = "length"
            self._finish(request, FinishReason.LENGTH, keep_running_entry=True)
        return delta

    def _finish(self, request: Request, reason: FinishReason, *, keep_running_entry: bool = False) -> None:
        """End a request from any state.  `update` sweeps `running` once, for all it finished."""
        if request.status is _RUNNING:
            if not keep_running_entry:
                self.running.remove(request)
            self._release(request)
        elif request in self.held:
            self.held.remove(request)
            self.swap.drop(request)
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
        queued = [*self.waiting, *self.held]
        live = [*self.running, *queued]
        assert len(set(map(id, live))) == len(live), "a request is in two places"
        assert all(r.status is _RUNNING and r.slot >= 0 for r in self.running)
        assert all(r.status is _WAITING and r.slot < 0 and not r.block_ids for r in queued)
        assert len(self.held) <= self.held.limit, "more requests are held than may be"
        slots = [*self._free_slots, *(r.slot for r in self.running)]
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), "a slot is lost or held twice"
        self.pool.check_integrity(self.running)
        self.swap.check_integrity(queued)
