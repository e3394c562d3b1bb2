"""From the target's own choices to a `StepOutput`: drafts count while they equal them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from inflight.engine.messages import TokenLogprobs
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.sampling import NO_TOKEN, fail_unusable_rows

__all__ = ["step_output"]


def step_output(
    out: SchedulerOutput,
    row_of_logits: np.ndarray,
    sampled: np.ndarray,
    logprobs: Mapping[int, TokenLogprobs],
    failures: Mapping[int, str] = MappingProxyType({}),
) -> StepOutput:
    """The step's tokens, without its times.

    Args:
        row_of_logits: int64 [N]; a row with k drafts has k + 1 consecutive logits.
        sampled: int64 [N]; the target's choice at each, negative where its logits are not finite.
        logprobs: of the N, those that were asked for.
        failures: of the N, why a choice means nothing.
    """
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
    for index, entry in logprobs.items():
        row = int(row_of_logits[index])
        entries = step.logprobs.setdefault(row, [])
        if len(entries) < len(step.token_runs.get(row, (0,))):
            entries.append(entry)
    fail_unusable_rows(step, sampled, row_of_logits, failures)
    return step


def _accepted(sampled: list[int], drafts: list[int]) -> list[int]:
    """The target's tokens up to the first that is not the draft in its place: 1 to len(drafts) + 1 of them."""
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return sampled[: count + 1]
    return sampled
