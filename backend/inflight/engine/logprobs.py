"""Puts a step's log probabilities into the news of its sequences.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.messages import SequenceDelta, TokenLogprobs
from inflight.engine.request import Request, Status
from inflight.engine.step import SchedulerOutput, StepOutput

__all__ = ["add_logprobs"]


def add_logprobs(news: list[SequenceDelta], rows: Sequence[Request], out: SchedulerOutput, step: StepOutput) -> None:
    """Complete the deltas in `news`; a sequence with prompt log probabilities and no token gets a delta.

    Args:
        rows: the requests of `out`, in its order.
    """
    delta_of = {(delta.request_id, delta.index): delta for delta in news}
    for row in step.logprobs.keys() | step.prompt_logprobs.keys():
        request = rows[row]
        delta = delta_of.get((request.request_id, request.index))
        if delta is None:
            if request.status is Status.FINISHED:
                continue  # ended while the step ran
            delta = SequenceDelta(request.request_id, request.index, [])
        delta.prompt_logprobs = _new_prompt_logprobs(request, row, out, step)
        if delta.token_ids:
            delta.logprobs = step.logprobs[row][: len(delta.token_ids)] if row in step.logprobs else None
        elif delta.prompt_logprobs is not None:
            news.append(delta)


def _new_prompt_logprobs(
    request: Request, row: int, out: SchedulerOutput, step: StepOutput
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
