"""The most likely tokens in a strict order: by falling logit, then by rising token id."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["argmax", "largest", "largest_values", "top_candidates"]

_LOW_HALF = 2**32 - 1

# Entries ranked at once on a GPU: a bound on memory.
_CHUNK = 2**24


def argmax(x: Tensor) -> Tensor:
    """int64[R]: place of the first largest entry of each row of x[R, V]."""
    if x.is_cpu and x.dtype == torch.float32:
        # numpy's is vectorised and several times faster than torch's on a CPU; same result.
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest entry of each row of x[R, V], or its first NaN: values [R] and places int64[R]."""
    if x.is_cpu and x.dtype == torch.float32:
        values = x.numpy()
        places = values.argmax(-1)
        return torch.from_numpy(values[np.arange(len(places)), places]), torch.from_numpy(places)
    return x.max(-1)


def largest_values(x: Tensor) -> Tensor:
    """The largest entry of each row of x[R, V], or its NaN: [R]."""
    return largest(x)[0] if x.is_cpu else x.amax(-1)


def top_candidates(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k (at most V) entries of each row of x[R, V]: values[R, k] and int64 ids[R, k].

    Which of several equal entries `torch.topk` takes, and in which order, depends on k; here
    the lowest ids come first, so a row's candidates do not depend on the rows beside it.
    """
    k = min(k, x.shape[-1])
    if not x.is_cpu:
        return _top_by_rank(x, k)
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
    """Replace those of `ids` whose entries equal the last of `values` by the lowest such ids in x[V]."""
    taken = values == values[-1]
    ids[taken] = (x == values[-1]).nonzero().flatten()[: int(taken.sum())]


def _top_by_rank(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same without reading a value on the host: no two entries have the same 64-bit rank."""
    complements = _LOW_HALF - torch.arange(x.shape[-1], device=x.device)
    parts = []
    for part in x.split(max(1, _CHUNK // x.shape[-1])):
        bits = (part.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
        ranks = (order << 32) + complements
        parts.append(_LOW_HALF - (ranks.topk(k, dim=-1).values & _LOW_HALF))
    ids = torch.cat(parts)
    return x.gather(-1, ids), ids
