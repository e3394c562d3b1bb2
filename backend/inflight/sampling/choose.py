"""The choice of a token for rows that are drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.sampling.candidates import argmax, top_candidates
from inflight.sampling.metadata import RandomGroup
from inflight.sampling.noise import negative_exponential, token_hashes

__all__ = ["draw"]

# Entries worked on at once: on a CPU about what its cache holds, on a GPU a bound on memory.
_CHUNK = {"cpu": 2**16}
_CHUNK_DEFAULT = 2**26


def draw(logits: Tensor, group: RandomGroup) -> Tensor:
    """int64[r]: a token for each row of `group`; `logits` is [R, V]."""
    r, vocab_size = len(group.rows), logits.shape[-1]
    step = max(1, _CHUNK.get(logits.device.type, _CHUNK_DEFAULT) // vocab_size)
    choose = _draw_from_candidates if group.max_top_k else _draw_from_vocabulary
    if step >= r:
        return choose(logits, group, slice(0, r))
    return torch.cat([choose(logits, group, slice(i, min(i + step, r))) for i in range(0, r, step)])


def _scaled(logits: Tensor, group: RandomGroup, part: slice) -> Tensor:
    """float32[c, V]: the part's logits over their temperatures."""
    if group.start >= 0:
        rows = logits[group.start + part.start : group.start + part.stop]
    else:
        rows = logits.index_select(0, group.rows[part])
    return rows * group.inverse_temperature[part]


def _weights(scaled: Tensor, largest: Tensor, group: RandomGroup, part: slice) -> Tensor:
    """Unnormalised probabilities, 1 for the most likely token, 0 for those that min_p drops.

    A fully masked row (largest is -inf) is drawn evenly.
    """
    weights = (scaled - largest).exp_()
    if group.min_p is not None:
        weights.masked_fill_(weights < group.min_p[part], 0.0)
    return weights


def _draw_from_vocabulary(logits: Tensor, group: RandomGroup, part: slice) -> Tensor:
    """Race the whole vocabulary; with top_p, again above the winner until it is in the nucleus.

    A winner outside the nucleus is removed with every token that is not more likely than it:
    those are outside too.  What wins at last is the winner among the nucleus alone, found
    without sorting the vocabulary.
    """
    scaled = _scaled(logits, group, part)
    weights = _weights(scaled, scaled.amax(-1, keepdim=True), group, part)
    hashes = token_hashes(logits.shape[-1], logits.device)
    scores = negative_exponential(hashes, (group.keys[0][part], group.keys[1][part])).div_(weights)
    winners = argmax(scores)
    if group.top_p is None:
        return winners
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64) * group.top_p[part]
    active = torch.arange(len(winners), device=logits.device)
    chosen = winners
    while True:
        above = _more_likely(weights, winners)
        mass_above = (weights * above).sum(-1, keepdim=True, dtype=torch.float64)
        rejected = ((mass_above >= mass) & (mass_above > 0)).flatten().nonzero().flatten()
        if not len(rejected):
            return chosen
        weights, mass, active = weights[rejected], mass[rejected], active[rejected]
        scores = scores[rejected].masked_fill_(~above[rejected], float("-inf"))
        winners = argmax(scores)
        chosen[active] = winners


def _more_likely(weights: Tensor, tokens: Tensor) -> Tensor:
    """bool[c, V]: which come before tokens[c] by falling weight, then by rising token id."""
    pivot = weights.gather(-1, tokens.unsqueeze(-1))
    ids = torch.arange(weights.shape[-1], device=weights.device)
    return (weights > pivot) | ((weights == pivot) & (ids < tokens.unsqueeze(-1)))


def _draw_from_candidates(logits: Tensor, group: RandomGroup, part: slice) -> Tensor:
    """Race the top_k most likely tokens, less those that min_p and top_p drop."""
    scaled, ids = top_candidates(_scaled(logits, group, part), group.max_top_k)
    weights = _weights(scaled, scaled[:, :1], group, part)
    places = torch.arange(weights.shape[-1], device=weights.device)
    weights.masked_fill_(places >= group.top_k[part], 0.0)
    if group.top_p is not None:
        mass = weights.cumsum(-1, dtype=torch.float64)
        outside = mass[:, :-1] >= mass[:, -1:] * group.top_p[part]
        weights[:, 1:].masked_fill_(outside, 0.0)
    hashes = token_hashes(logits.shape[-1], logits.device)[ids]
    scores = negative_exponential(hashes, (group.keys[0][part], group.keys[1][part])).div_(weights)
    return ids.gather(-1, argmax(scores).unsqueeze(-1)).squeeze(-1)
