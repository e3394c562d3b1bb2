"""Repetition, frequency and presence penalties in one kernel launch on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inflight.sampling.rules.penalties import PenalisedTokens

__all__ = ["penalise"]

_BLOCK = 256


@triton.jit(do_not_specialize=["num_pairs", "num_columns"])
def penalise_kernel(
    logits_ptr, index_ptr, counts_ptr, columns_ptr, strengths_ptr, num_pairs, num_columns, BLOCK: tl.constexpr
):
    """BLOCK distinct (row, token) pairs, by the arithmetic of `rules.penalties`, operation by operation."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    place = logits_ptr + tl.load(index_ptr + pairs, mask=inside, other=0)
    strengths = strengths_ptr + tl.load(columns_ptr + pairs, mask=inside, other=0)
    repetition = tl.load(strengths, mask=inside, other=1.0)
    frequency = tl.load(strengths + num_columns, mask=inside, other=0.0)
    presence = tl.load(strengths + 2 * num_columns, mask=inside, other=0.0)
    count = tl.load(counts_ptr + pairs, mask=inside, other=0.0)
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = x - frequency * count
    x = x - presence * (count > 0.0).to(tl.float32)
    tl.store(place, x, mask=inside)


def penalise(logits: Tensor, penalised: PenalisedTokens) -> None:
    """Apply the penalties to float32 logits[R, V], contiguous, in place."""
    num_pairs = len(penalised.index)
    penalise_kernel[(triton.cdiv(num_pairs, _BLOCK),)](
        logits,
        penalised.index,
        penalised.counts,
        penalised.columns,
        penalised.strengths.contiguous(),
        num_pairs,
        penalised.strengths.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
