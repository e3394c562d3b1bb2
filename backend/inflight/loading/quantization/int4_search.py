"""Codes of four bits for plain weights, without data: a scale and a min for each group of 32 inputs.

weight = code * scale - min, where scale and min of a group are integers of eight bits times a number of the output.
For each group, some scales around the range of its weights are tried; to the codes that each gives belong the scale and
the min with the least weighted squares of errors, and the best pair is kept.  Large weights count more, as in the
search of llama.cpp for its format Q4_K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.ops.int4 import Int4Weight, span_of, tiled

__all__ = ["GROUP", "bytes_of", "quantised"]

GROUP = 32
_TOP = 15  # the largest code
_TRIED = [_TOP - 1 + 0.1 * step for step in range(21)]  # steps of a code in a group's range
_LARGEST = 255  # of the integers that scale and min become
_AT_ONCE = 2**22  # weights that are searched at once


def bytes_of(num_outputs: int, num_inputs: int) -> int:
    """Bytes of a quantised weight."""
    return num_outputs * (num_inputs // 2 + 2 * (num_inputs // GROUP) + 8)


def quantised(weight: Tensor) -> Int4Weight:
    """The nearest weight in four bits to a plain one [N, K], which is finite; K is a multiple of GROUP."""
    num_outputs, num_inputs = weight.shape
    span = span_of(num_inputs, GROUP)
    assert span is not None
    rows = max(1, _AT_ONCE // num_inputs)
    parts = [_rows(weight[start : start + rows].float()) for start in range(0, num_outputs, rows)]
    codes, scales, mins, factors = (torch.cat(each) for each in zip(*parts))
    return Int4Weight(tiled(codes, span), *(x.t().contiguous() for x in (scales, mins, factors)))


def _rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float32 [N, K] -> codes [N, K], scales and mins [N, K / GROUP], all uint8, and factors [N, 2]."""
    groups = weight.view(len(weight), -1, GROUP)
    scale, least = _search(groups)
    factors = torch.stack((scale.amax(1), least.amax(1)), 1) / _LARGEST
    safe = torch.where(factors > 0, factors, 1.0)
    scales, mins = ((x / safe[:, i : i + 1]).round() for i, x in enumerate((scale, least)))
    scale, least = scales * factors[:, :1], mins * factors[:, 1:]
    steps = (groups + least[..., None]) / torch.where(scale > 0, scale, 1.0)[..., None]
    codes = steps.round_().clamp_(0, _TOP).to(torch.uint8).flatten(1)
    return codes, scales.to(torch.uint8), mins.to(torch.uint8), factors


def _search(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and min of float32 [N, G, GROUP], neither negative."""
    importance = groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    total, total_x = importance.sum(-1), (importance * groups).sum(-1)
    best_scale, best_least = (high - low) / _TOP, -low

    def error(scale: Tensor, least: Tensor, codes: Tensor) -> Tensor:
        return (importance * (codes * scale[..., None] - least[..., None] - groups).square()).sum(-1)

    def codes_of(steps: float) -> Tensor:
        return ((groups - low[..., None]) * (steps / (high - low))[..., None]).round_().clamp_(0, _TOP)

    best = error(best_scale, best_least, codes_of(_TOP).nan_to_num_())
    for steps in _TRIED:
        codes = codes_of(steps)
        weighted = importance * codes
        total_q, total_qq, total_qx = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * groups).sum(-1)
        determinant = total * total_qq - total_q.square()
        scale = (total * total_qx - total_x * total_q) / determinant
        least = (total_q * total_qx - total_qq * total_x) / determinant
        scale = torch.where(least < 0, total_qx / total_qq, scale)
        least = least.clamp(min=0)
        found = error(scale, least, codes)
        better = (found < best) & (scale > 0)  # false where nothing is defined, as for equal codes
        best = torch.where(better, found, best)
        best_scale, best_least = torch.where(better, scale, best_scale), torch.where(better, least, best_least)
    return best_scale, best_least
