"""Plain data between scheduler, runner and engine core, one pair a step.  No torch.

A row is a place in the runner's batch state: the scheduler owns which request sits in which
slot; the runner keeps, per slot, token ids, block table and sampling parameters, so that a step
says only what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.engine.messages import TokenLogprobs
from inflight.engine.request import Request, SamplingParams

__all__ = ["NewRow", "SchedulerOutput", "StepOutput"]


@dataclass(slots=True)
class NewRow:
    """A request that enters a slot: admitted, or resumed after preemption.

    Attributes:
        slot: row in the batch state; its old contents are void.
        token_ids: prompt plus output so far; an array of int32 is copied fastest.
        num_prompt_tokens: where the output starts.
        block_ids: whole block table so far.
        seed: 64-bit seed of the sequence's noise.
    """

    slot: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int


@dataclass(slots=True)
class SchedulerOutput:
    """One ragged batch.  The five lists below `requests` are parallel to it.

    Attributes:
        requests: scheduled requests, in batch order; each appears once.
        slots: their rows.
        num_scheduled_tokens: tokens of each in this step, >= 1; the sum is within the budget.
        num_computed_tokens: position of the first scheduled token of each.
        samples: whether the step computes the last known token of each, so that one is sampled.
        total_tokens: sum of `num_scheduled_tokens`.
        new_rows: rows to fill before the step.
        new_block_ids: slot -> blocks appended to a row that was already in place.
        preempted: requests that lost slot and blocks while this step was made.
        swap_out: host block -> block that is copied there before anything else of the step.
        swap_in: block -> host block that is copied there next, before the forward pass.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    swap_out: dict[int, int] = field(default_factory=dict)
    swap_in: dict[int, int] = field(default_factory=dict)
    total_tokens: int = 0

    def append(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of a request that holds their blocks."""
        computed = request.num_computed_tokens
        end = request.num_computed_tokens = computed + num_tokens
        samples = end == request.num_total_tokens
        if samples:
            request.num_total_tokens += 1
        self.requests.append(request)
        self.slots.append(request.slot)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_computed_tokens.append(computed)
        self.samples.append(samples)
        self.total_tokens += num_tokens

    def put_first(self, decodes: list[Request], num_computed_tokens: list[int]) -> None:
        """Schedule one token, which samples, of each, ahead of all others; their own counts are already past it."""
        self.requests[:0] = decodes
        self.slots[:0] = [request.slot for request in decodes]
        self.num_computed_tokens[:0] = num_computed_tokens
        self.num_scheduled_tokens[:0] = [1] * len(decodes)
        self.samples[:0] = [True] * len(decodes)
        self.total_tokens += len(decodes)


@dataclass(slots=True)
class StepOutput:
    """What the runner made of a `SchedulerOutput`; lists are parallel to its `requests`.

    Attributes:
        token_ids: sampled token of each row, -1 where none was sampled.
        logprobs: row -> entry of its sampled token, for rows that asked.
        prompt_logprobs: row -> entries for the prompt tokens *predicted* by this step's
            positions, for rows that asked.
        forward_end: `time.monotonic()` between forward pass and sampling, where the runner tells.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    forward_end: float | None = None
