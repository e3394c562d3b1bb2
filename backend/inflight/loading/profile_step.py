"""The steps that take the most memory, to measure them: a full budget of tokens, every slot, every kind of output."""

from __future__ import annotations

import msgspec
import numpy as np

from inflight.config import EngineConfig
from inflight.engine.logprobs import prompt_token_weight
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput

__all__ = ["largest_step", "largest_steps"]

_FEW_LOGPROBS = 5
# Edited logits, a nucleus, log probabilities of outputs and prompt: what sampling and its kin copy logits for.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)


def largest_steps(config: EngineConfig, max_model_len: int, num_blocks: int, vocab_size: int) -> list[SchedulerOutput]:
    """The step of most tokens and, if requests can ask for many log probabilities, the step of most of these.

    The scheduler gives the second fewer prompt tokens (`WeighedPrompts`), but each has up to a vocabulary of results.
    """
    rows, tokens = config.max_num_seqs, config.step_tokens
    limits = max_model_len, config.block_size, num_blocks, vocab_size
    steps = [largest_step(rows, tokens, *limits)]
    most = vocab_size if config.max_logprobs == -1 else min(config.max_logprobs, vocab_size)
    if most > _FEW_LOGPROBS:
        asking = min(tokens, min(rows, tokens) + max(1, int(tokens / prompt_token_weight(most))))
        steps.append(largest_step(rows, asking, *limits, num_logprobs=most))
    return steps


def largest_step(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    num_logprobs: int = _FEW_LOGPROBS,
) -> SchedulerOutput:
    """A step of `max_num_batched_tokens` tokens and `max_num_seqs` rows that all sample, as far as these allow.

    The first rows compute prompts, the others a token each.  The first ends at the last position that is ever
    computed, so the batch has its largest maxima.  Block tables repeat the blocks of a pool of any size, and what is
    written there overwrites itself: only shapes are those of a real step.

    Args:
        num_logprobs: that each row asks for, of the prompt and of the output.
    """
    params = msgspec.structs.replace(_PARAMS, logprobs=num_logprobs, prompt_logprobs=num_logprobs)
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
            params=params,
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
