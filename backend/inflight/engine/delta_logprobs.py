"""Puts a step's log probabilities and pooled vectors into the deltas of its sequences.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs
from inflight.engine.request import Request, Status
from inflight.engine.step import SchedulerOutput, StepOutput

__all__ = ["add_results"]

# Most prompt triples in one delta: the frontend processes deltas one by one, so those of other requests get their turn.
_MAX_TRIPLES = 4096
_NOTHING = Logprobs([0])  # nothing predicts the first token of a prompt


def add_results(deltas: list[SequenceDelta], rows: Sequence[Request], out: SchedulerOutput, step: StepOutput) -> None:
    """Complete the deltas in `deltas`; a sequence with prompt log probabilities and no token gets a delta.

    Args:
        rows: the requests of `out`, in its order.
    """
    delta_of = {(delta.request_id, delta.index): delta for delta in deltas}
    pieces: list[SequenceDelta] = []
    for row in step.logprobs.keys() | step.prompt_logprobs.keys() | step.pooled.keys():
        request = rows[row]
        delta = delta_of.get((request.request_id, request.index))
        if delta is None:
            if request.status is Status.FINISHED:
                continue  # ended while the step ran
            delta = SequenceDelta(request.request_id, request.index, [])
        if row in step.pooled:  # in place of its token, which is void
            delta.token_ids, delta.finish_reason, delta.pooled = [], "stop", step.pooled[row]
            continue
        prompt_logprobs = _new_prompt_logprobs(request, row, out, step)
        if prompt_logprobs is not None:
            *parts, delta.prompt_logprobs = _split(prompt_logprobs)
            pieces += [SequenceDelta(request.request_id, request.index, [], prompt_logprobs=part) for part in parts]
        if delta.token_ids:
            delta.logprobs = step.logprobs[row][: len(delta.token_ids)] if row in step.logprobs else None
        elif delta.prompt_logprobs is not None:
            deltas.append(delta)
    deltas[:0] = pieces  # before the deltas that may end their sequences


def _split(logprobs: Logprobs) -> list[Logprobs]:
    """Parts of at most `_MAX_TRIPLES`, or of one token."""
    size = max(1, _MAX_TRIPLES // max(1, *logprobs.counts))
    return list(logprobs.split(min(size, len(logprobs) - start) for start in range(0, len(logprobs), size)))


def _new_prompt_logprobs(request: Request, row: int, out: SchedulerOutput, step: StepOutput) -> Logprobs | None:
    """The entries not delivered yet: a preempted request computes its prompt twice."""
    entries = step.prompt_logprobs.get(row)
    if entries is None:
        return None
    end = min(out.num_computed_tokens[row] + out.num_scheduled_tokens[row] + 1, request.num_prompt_tokens)
    start = end - len(entries)  # prompt index of entries[0]
    new = entries[max(0, request.num_prompt_logprobs - start) :]
    if request.num_prompt_logprobs == 0:
        new = Logprobs.joined([_NOTHING, new])
    request.num_prompt_logprobs = max(request.num_prompt_logprobs, end)
    return new if len(new) else None
