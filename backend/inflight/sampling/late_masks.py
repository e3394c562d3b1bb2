"""On a CPU, tokens are chosen first, and masks are made only for rows that chose a token that is not allowed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.sampling.metadata import COLUMN_LINES, Kind, SamplingMetadata
from inflight.sampling.unusable import NO_TOKEN

__all__ = ["mask_where_needed"]


def mask_where_needed(
    logits: Tensor, token_ids: Tensor, metadata: SamplingMetadata
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """The tokens with the one mask of `metadata`, which has no edits, and whose `ops` draw masked rows.

    Args:
        token_ids: int64[R], chosen without the mask; changed in place.

    Returns:
        int64[R], the masked logits of all rows that return log probabilities, and the mask's failures.
    """
    columns = None if metadata.columns is None else metadata.columns.numpy()
    chosen = token_ids.numpy()
    whole = np.zeros(metadata.num_rows, dtype=bool)
    whole[list(metadata.logprobs)] = True
    needed = metadata.masks[0].still_needed(chosen, _certain(metadata, columns), whole)
    if needed is None:
        return token_ids, logits, {}
    rows, bitmask = needed.rows, needed.bitmask()
    again = metadata.ops.choose(logits, _columns_of(rows, columns), marks=False, bitmask=bitmask).numpy()
    chosen[rows] = np.where(chosen[rows] == NO_TOKEN, NO_TOKEN, again[rows])
    if metadata.logprobs:
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        metadata.ops.mask(logits, rows, bitmask)
    return token_ids, logits, needed.failures


def _certain(metadata: SamplingMetadata, columns: np.ndarray | None) -> np.ndarray:
    """bool[R]: rows that get the same token with a mask as without, if it allows that token.

    The greedy rows, and rows that race in the whole vocabulary: the winner without the mask still wins.
    """
    return np.ones(metadata.num_rows, dtype=bool) if columns is None else columns[6] <= int(Kind.RANDOM)


def _columns_of(rows: np.ndarray, columns: np.ndarray | None) -> Tensor:
    """`SamplingMetadata.columns` of these rows only; without any, all are greedy."""
    if columns is None:
        taken = np.zeros((COLUMN_LINES, len(rows)), dtype=np.int64)
        taken[0], taken[6] = rows, int(Kind.GREEDY)
    else:  # in the order of the rows
        taken = columns if len(rows) == columns.shape[1] else columns[:, rows]
    return torch.from_numpy(taken)
