"""Drawing a token at random, for groups of rows that are drawn in the same way."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.sampling.candidates import argmax, top_candidates
from inflight.sampling.metadata import RandomGroup
from inflight.sampling.noise import negative_exponential, token_hashes

__all__ = ["draw"]

# Logits worked on at once: about what fits the cache of a CPU; on a GPU, a bound on memory.
_CHUNK_CPU = 2**17
_CHUNK_GPU = 2**26


def draw(logits: Tensor, group: RandomGroup) -> tuple[Tensor, Tensor]:
    """One token per row of `group`, int64[r], and the row's largest logit, [r]; `logits` is [R, V]."""
    if group.max_top_k:
        return _draw_from_candidates(logits, group)
    r = len(group.rows)
    step = max(1, (_CHUNK_CPU if logits.is_cpu else _CHUNK_GPU) // logits.shape[-1])
    parts = [_draw_from_vocabulary(logits, group, slice(i, min(i + step, r))) for i in range(0, r, step)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([tops for _, tops in parts])


def _rows(logits: Tensor, group: RandomGroup, part: slice) -> Tensor:
    """Logits of a part of the group; a view if its rows are consecutive."""
    if group.start >= 0:
        return logits[group.start + part.start : group.start + part.stop]
    return logits.index_select(0, group.rows[part])


def _weights(scaled: Tensor, largest: Tensor, min_p: Tensor | None) -> Tensor:
    """Unnormalised probabilities: 1 for the most likely token, 0 for tokens that min_p drops.

    In a fully masked row all are 0, and so is its token.  Overwrites `scaled`.
    """
    weights = scaled.sub_(largest.clamp(min=torch.finfo(torch.float32).min)).exp_()
    if min_p is not None:
        weights *= torch.ge(weights, min_p, out=torch.empty_like(weights))
    return weights


def _draw_from_candidates(logits: Tensor, group: RandomGroup) -> tuple[Tensor, Tensor]:
    """Race the top_k most likely tokens, without the tokens that min_p and top_p drop."""
    rows = _rows(logits, group, slice(0, len(group.rows)))
    values, ids = top_candidates(rows, group.max_top_k)
    tops = values[:, 0].clone() if rows.is_cpu else rows.amax(-1)  # off a CPU some NaN rank last
    scaled = values * group.inverse_temperature
    weights = _weights(scaled, scaled[:, :1].clone(), group.min_p)
    weights.masked_fill_(torch.arange(weights.shape[-1], device=weights.device) >= group.top_k, 0.0)
    if group.top_p is not None:
        mass = weights.cumsum(-1, dtype=torch.float64)
        weights[:, 1:].masked_fill_(mass[:, :-1] >= mass[:, -1:] * group.top_p, 0.0)
    hashes = token_hashes(logits.shape[-1], logits.device)[ids]
    winners = argmax(negative_exponential(hashes, group.keys).div_(weights))
    return ids.gather(-1, winners.unsqueeze(-1)).squeeze(-1), tops


def _draw_from_vocabulary(logits: Tensor, group: RandomGroup, part: slice) -> tuple[Tensor, Tensor]:
    """Race the whole vocabulary, without what min_p and top_p drop."""
    rows = _rows(logits, group, part)
    tops = rows.amax(-1)
    return _race_in_rows(rows, tops.unsqueeze(-1), group, part), tops


def _race_in_rows(rows: Tensor, tops: Tensor, group: RandomGroup, part: slice) -> Tensor:
    """int64[c]: a token for each of `rows[c, V]`, a part of the group; `tops` [c, 1] are the largest of each."""
    keys = group.keys[0][part], group.keys[1][part]
    hashes = token_hashes(rows.shape[-1], rows.device)
    temperature = group.inverse_temperature[part]
    min_p = None if group.min_p is None else group.min_p[part]
    weights = _weights(rows * temperature, tops * temperature, min_p)
    if group.top_p is None and min_p is None:
        return argmax(negative_exponential(hashes, keys).div_(weights))
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64)
    top_p = torch.ones_like(mass) if group.top_p is None else group.top_p[part]
    # Tokens at or below this weigh at most 1 - top_p together, so none is in the nucleus.
    floor = mass * (1.0 - top_p) * (0.999 / rows.shape[-1])
    shortlist = _shortlist(weights, floor.float()) if rows.is_cpu else None
    if shortlist is None:
        return _race_in_nucleus(negative_exponential(hashes, keys).div_(weights), weights, mass * top_p)
    ids, padding = shortlist
    weights = weights.gather(-1, ids).masked_fill_(padding, 0.0)
    scores = negative_exponential(hashes[ids], keys).div_(weights)
    return ids.gather(-1, _race_in_nucleus(scores, weights, mass * top_p).unsqueeze(-1)).squeeze(-1)


def _race_in_nucleus(scores: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """int64[c]: place of the best score in the smallest set of top weights that reaches `mass`.

    A winner outside the set is removed, together with every entry that is not heavier: those are
    outside too.  Then the race is run again.  This finds the winner of the set without sorting.

    Args:
        scores, weights: float32[c, n].
        mass: float64[c, 1].
    """
    chosen = winners = argmax(scores)
    active = torch.arange(len(winners), device=winners.device)
    while True:
        heavier = _heavier(weights, winners)
        mass_above = (weights * heavier).sum(-1, keepdim=True, dtype=torch.float64)
        rejected = ((mass_above >= mass) & (mass_above > 0)).flatten().nonzero().flatten()
        if not len(rejected):
            return chosen
        active, weights, mass = active[rejected], weights[rejected], mass[rejected]
        scores = scores[rejected].div_(heavier[rejected])  # scores are negative: divided by 0 they are -inf
        winners = argmax(scores)
        chosen[active] = winners


def _heavier(weights: Tensor, places: Tensor) -> Tensor:
    """float32[c, n]: 1 for entries before `places[c]` by falling weight, then by rising place; else 0.

    Comparisons into float32 are several times faster than into bool on a CPU.
    """
    places = places.unsqueeze(-1)
    pivot = weights.gather(-1, places)
    order = torch.arange(weights.shape[-1], dtype=torch.float32, device=weights.device)
    ties = torch.eq(weights, pivot, out=torch.empty_like(weights))
    ties *= torch.lt(order, places, out=torch.empty_like(weights))
    return torch.gt(weights, pivot, out=torch.empty_like(weights)).add_(ties)


def _shortlist(weights: Tensor, floor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Places of the entries above `floor[c, 1]`, increasing: int64[c, n], and bool[c, n], where it is padding.

    None if that would drop less than half of the entries.
    """
    c, vocab_size = weights.shape
    kept = np.flatnonzero(weights.numpy() > floor.numpy())
    cuts = np.searchsorted(kept, np.arange(c + 1) * vocab_size)
    sizes = np.diff(cuts)
    longest = max(1, int(sizes.max()))
    if 2 * longest > vocab_size:
        return None
    ids = np.zeros((c, longest), dtype=np.int64)
    for row in range(c):
        ids[row, : sizes[row]] = kept[cuts[row] : cuts[row + 1]] - row * vocab_size
    return torch.from_numpy(ids), torch.from_numpy(np.arange(longest) >= sizes[:, None])
