"""The most likely tokens in a strict order: by falling logit, then by rising token id."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["argmax", "top_candidates"]


def argmax(x: Tensor) -> Tensor:
    """int64[R]: place of the first largest entry of each row of x[R, V]."""
    if x.is_cpu and x.dtype == torch.float32:
        # numpy's is vectorised and several times faster than torch's on a CPU; same result.
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def top_candidates(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k (at most V) entries of each row of x[R, V]: values[R, k] and int64 ids[R, k].

    Which of several equal entries `torch.topk` takes, and in which order, depends on k; here
    the lowest ids come first, so a row's candidates do not depend on the rows beside it.
    """
    k = min(k, x.shape[-1])
    values, ids = torch.topk(x, min(k + 1, x.shape[-1]), dim=-1)
    if values.shape[-1] > k:
        straddles = values[:, k] == values[:, k - 1]
        values, ids = values[:, :k], ids[:, :k]
        for row in straddles.nonzero().flatten().tolist():
            _take_lowest_ties(x[row], values[row], ids[row])
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _take_lowest_ties(x: Tensor, values: Tensor, ids: Tensor) -> None:
    """Make `ids` hold the lowest of the entries of x[V] that equal the last of `values`."""
    taken = values == values[-1]
    ids[taken] = (x == values[-1]).nonzero().flatten()[: int(taken.sum())]
