"""Rows that no token can be chosen for: the model's logits are not numbers.

The largest logit of a row tells: it is NaN if any logit is, +inf if any is, and -inf if all are.  It is found on
the way to the token in any case.  Masks do not make a row unusable: one that they leave without a token still gets one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from inflight.engine.step import StepOutput

__all__ = ["NO_TOKEN", "UNUSABLE_LOGITS", "are_finite", "fail_unusable_rows", "mark_unusable"]

NO_TOKEN = -1  # in place of a token id

UNUSABLE_LOGITS = (
    "the model's logits for this request are not finite (NaN or infinity): its weights contain NaN, or its arithmetic "
    'overflowed; check the checkpoint, or set "dtype": "float32" in model.json'
)


def are_finite(tops: Tensor) -> bool:
    """Whether the largest logits of some rows are; waits for the device."""
    if tops.is_cpu and tops.dtype == torch.float32:
        return bool(np.isfinite(tops.numpy()).all())  # a third of the time of torch's, and every step asks
    return bool(tops.isfinite().all())


def mark_unusable(token_ids: Tensor, tops: Tensor) -> Tensor:
    """`token_ids` int64[R] with `NO_TOKEN` where the row's largest logit, `tops[R]`, is not finite."""
    if tops.is_cpu and are_finite(tops):
        return token_ids
    return torch.where(tops.isfinite(), token_ids, NO_TOKEN)


def fail_unusable_rows(
    step: StepOutput, sampled: np.ndarray, rows: np.ndarray, reasons: Mapping[int, str] = MappingProxyType({})
) -> None:
    """Move the rows without a token from the sampled ones of `step` to its `row_failures`.

    A row with drafts fails only if its own run of tokens ends there; tokens behind a refused draft are void.

    Args:
        sampled: int64[N], token ids on the host.
        rows: int64[N], the row of the step that each belongs to.
        reasons: why some of the N have none; the model's logits are to blame for the others.
    """
    if not (sampled < 0).any():
        return
    for row in dict.fromkeys(rows[sampled < 0].tolist()):
        if step.token_runs.get(row, [NO_TOKEN])[-1] < 0:
            first = int(np.flatnonzero((rows == row) & (sampled < 0))[0])
            step.row_failures[row] = reasons.get(first, UNUSABLE_LOGITS)
            step.token_runs.pop(row, None)
            step.logprobs.pop(row, None)
