"""From the target's own choices to a `StepOutput`: drafts count while they equal them."""

from __future__ import annotations

import numpy as np

from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.sampling import SamplerOutput, fail_unusable_rows
from inflight.sampling.unusable import NO_TOKEN

__all__ = ["step_output"]


def step_output(
    out: SchedulerOutput, row_of_logits: np.ndarray, sampled: np.ndarray, output: SamplerOutput | None = None
) -> StepOutput:
    """The step's tokens, without its times.

    Args:
        row_of_logits: int64 [N]; a row with k drafts has k + 1 consecutive logits.
        sampled: int64 [N]; the target's choice at each, negative where its logits are not finite.
        output: has the log probabilities of those of the N that asked, and why a choice is invalid.
    """
    failures = {} if output is None else output.failures
    if failures:
        sampled = sampled.copy()
        sampled[list(failures)] = NO_TOKEN
    token_ids = np.full(len(out.slots), -1, dtype=np.int64)
    token_ids[row_of_logits] = sampled
    step = StepOutput()
    for row, drafts in out.draft_token_ids.items():
        start = int(np.searchsorted(row_of_logits, row))
        step.token_runs[row] = _accepted(sampled[start : start + len(drafts) + 1].tolist(), drafts)
        token_ids[row] = -1
    step.token_ids = token_ids.tolist()
    if output is not None and output.logprobs_rows:
        _add_logprobs(step, row_of_logits[output.logprobs_rows], output)
    fail_unusable_rows(step, sampled, row_of_logits, failures)
    return step


def _add_logprobs(step: StepOutput, rows: np.ndarray, output: SamplerOutput) -> None:
    """The log probabilities of the tokens that the step yields.

    Args:
        rows: int64; the step's row of each of `output.logprobs_rows`.
    """
    asked, counts = np.unique(rows, return_counts=True)
    for row, logprobs in zip(asked.tolist(), output.logprobs.split(counts.tolist())):
        step.logprobs[row] = logprobs[: len(step.token_runs.get(row, (NO_TOKEN,)))]


def _accepted(sampled: list[int], drafts: list[int]) -> list[int]:
    """The target's tokens up to the first that is not the draft in its place: 1 to len(drafts) + 1 of them."""
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return sampled[: count + 1]
    return sampled
