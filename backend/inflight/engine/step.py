"""Plain, serialisable data between scheduler and runner, one pair per step.  No torch.

A row is a request's place in a step; a slot is its place in the runner's batch state for as long as it
runs.  The scheduler assigns slots to requests; the runner keeps, per slot, token ids, block table and
sampling parameters, so that a step carries only changes.
"""

from __future__ import annotations

import msgspec

from inflight.engine.attached import Attached
from inflight.engine.logprobs import Logprobs
from inflight.engine.sampling_params import SamplingParams

__all__ = ["NewRow", "SchedulerOutput", "StepOutput"]


class NewRow(msgspec.Struct, array_like=True):
    """A sequence that enters a slot: admitted, or resumed after preemption.

    Attributes:
        slot: its place in the batch state; the slot's old contents are invalid.
        request_id, index: which sequence.
        token_ids: int32 in native byte order; prompt plus output so far.
        num_prompt_tokens: where the output starts.
        block_ids: the whole block table so far.
        seed: 64-bit seed of the sequence's noise.
        attached: for step hooks.
    """

    slot: int
    request_id: int
    index: int
    token_ids: bytes
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    attached: Attached | None = None


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One ragged batch of R rows.  The first four lists are parallel.

    A row that samples computes its last known token and k >= 0 draft tokens after it, and needs k + 1 logits.
    The runner applies the changes in the order swap_out, swap_in, num_kept_blocks, new_rows, new_block_ids.

    Attributes:
        slots: [R]; each appears once.
        num_scheduled_tokens: [R]; tokens to compute, drafts included, >= 1.
        num_computed_tokens: [R]; position of the first of them.
        samples: [R]; whether the row computes the last known token of its request, so that it samples.
        num_tokens: sum of `num_scheduled_tokens`; within the step's budget.
        num_prompt_tokens: how many of them belong to prompts.
        draft_token_ids: row -> its k drafts, for k > 0.
        new_rows: slots to fill before the step.
        new_block_ids: slot -> blocks appended to its block table.
        num_kept_blocks: slot -> length to which its block table is cut: blocks of refused drafts were freed.
        preempted: slots that sequences lost, with their blocks, while this step was made.
        swap_out: host block -> device block to copy into it.
        swap_in: device block -> host block to copy into it.
    """

    slots: list[int] = []
    num_scheduled_tokens: list[int] = []
    num_computed_tokens: list[int] = []
    samples: list[bool] = []
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    draft_token_ids: dict[int, list[int]] = {}
    new_rows: list[NewRow] = []
    new_block_ids: dict[int, list[int]] = {}
    num_kept_blocks: dict[int, int] = {}
    preempted: list[int] = []
    swap_out: dict[int, int] = {}
    swap_in: dict[int, int] = {}

    def append(self, slot: int, num_tokens: int, num_computed: int, samples: bool) -> None:
        """Add a row after the others."""
        self.slots.append(slot)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_computed_tokens.append(num_computed)
        self.samples.append(samples)
        self.num_tokens += num_tokens

    def prepend_decodes(self, slots: list[int], num_computed: list[int]) -> None:
        """Add rows with one token each, which sample, before all others."""
        self.slots[:0] = slots
        self.num_computed_tokens[:0] = num_computed
        self.num_scheduled_tokens[:0] = [1] * len(slots)
        self.samples[:0] = [True] * len(slots)
        self.num_tokens += len(slots)


class StepOutput(msgspec.Struct, array_like=True):
    """The runner's result for a `SchedulerOutput`.  Times are seconds on the engine's clock.

    Attributes:
        token_ids: [R]; the sampled token of each row, -1 for rows without one and for rows with drafts.
        token_runs: row -> the 1 to k + 1 tokens of a row with k drafts: the drafts that equal the target's
            own samples, then the target's next sample.
        logprobs: row -> log probabilities of its sampled tokens, if requested.
        prompt_logprobs: row -> log probabilities of the prompt tokens that this step's positions *predict*, if
            requested.
        started: when the device began the step.
        forward_end: when the forward pass ended, if the runner knows.
        ended: when the tokens were available.
        failure: why the step was not computed, in words for the clients of its requests; "" if it was.  A failed step
            made only its copies to and from the host.
        row_failures: row -> the same for a row that was computed but yielded no valid token.
        pooled: row -> the vector that it yields in place of a token, float32 in native byte order.
    """

    token_ids: list[int] = []
    token_runs: dict[int, list[int]] = {}
    logprobs: dict[int, Logprobs] = {}
    prompt_logprobs: dict[int, Logprobs] = {}
    started: float = 0.0
    forward_end: float | None = None
    ended: float = 0.0
    failure: str = ""
    row_failures: dict[int, str] = {}
    pooled: dict[int, bytes] = {}
