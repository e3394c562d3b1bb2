"""The step that takes the most memory, to measure it: a full budget of tokens, every slot, every kind of output."""

from __future__ import annotations

import numpy as np

from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput

__all__ = ["largest_step"]

# Edited logits, a nucleus, log probabilities of outputs and prompt: what sampling and its kin copy logits for.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5)


def largest_step(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
) -> SchedulerOutput:
    """A step of `max_num_batched_tokens` tokens and `max_num_seqs` rows that all sample, as far as these allow.

    The first rows compute prompts, the others a token each.  The first ends at the last position that is ever
    computed, so the batch has its largest maxima.  Block tables repeat the blocks of a pool of any size, and what is
    written there overwrites itself: only shapes are those of a real step.
    """
    longest = max_model_len - 1  # the KV of the very last token is never computed
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    counts = [1] * num_rows
    spare = max_num_batched_tokens - num_rows
    for row in range(num_rows):
        counts[row] += min(spare, longest - 1)
        spare -= counts[row] - 1
    ends = [longest, *counts[1:]]
    token_ids = np.random.default_rng(0).integers(0, vocab_size, longest, dtype=np.int32)
    rows = [
        NewRow(
            slot,
            request_id=slot,
            index=0,
            token_ids=token_ids[:end].tobytes(),
            num_prompt_tokens=end,
            block_ids=[index % num_blocks for index in range(-(-end // block_size))],
            params=_PARAMS,
            seed=slot,
        )
        for slot, end in enumerate(ends)
    ]
    return SchedulerOutput(
        slots=list(range(num_rows)),
        num_scheduled_tokens=counts,
        num_computed_tokens=[end - count for end, count in zip(ends, counts)],
        samples=[True] * num_rows,
        num_tokens=sum(counts),
        num_prompt_tokens=sum(counts),
        new_rows=rows,
    )
