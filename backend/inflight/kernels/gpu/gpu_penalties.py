"""Repetition, frequency and presence penalties on a GPU: of listed tokens, or of tokens counted there."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inflight.sampling.ops import CountedRows, PenalisedTokens

__all__ = ["count_and_penalise", "penalise"]

_BLOCK = 256
_COUNTED_BLOCK = 1024


@triton.jit
def _penalised(x, repetition, frequency, presence, count):
    """By the arithmetic of `sampling.reference.penalised`, operation by operation."""
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = x - frequency * count
    return x - presence * (count > 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs", "num_columns"])
def penalise_kernel(
    logits_ptr, index_ptr, counts_ptr, columns_ptr, strengths_ptr, num_pairs, num_columns, BLOCK: tl.constexpr
):
    """BLOCK distinct (row, token) pairs."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    place = logits_ptr + tl.load(index_ptr + pairs, mask=inside, other=0)
    strengths = strengths_ptr + tl.load(columns_ptr + pairs, mask=inside, other=0)
    repetition = tl.load(strengths, mask=inside, other=1.0)
    frequency = tl.load(strengths + num_columns, mask=inside, other=0.0)
    presence = tl.load(strengths + 2 * num_columns, mask=inside, other=0.0)
    count = tl.load(counts_ptr + pairs, mask=inside, other=0.0)
    x = tl.load(place, mask=inside, other=0.0)
    tl.store(place, _penalised(x, repetition, frequency, presence, count), mask=inside)


@triton.jit(do_not_specialize=["history_stride", "num_rows"])
def count_kernel(counts_ptr, vocab_size, history, history_stride, rows, num_rows, BLOCK: tl.constexpr):
    """Bring the count row of column i of `CountedRows.rows` up to date.  Grid (num_rows,)."""
    i = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    tokens = history + tl.load(rows + num_rows + i).to(tl.int64) * history_stride
    counts = counts_ptr + tl.load(rows + 2 * num_rows + i).to(tl.int64) * vocab_size
    start, end = tl.load(rows + 4 * num_rows + i), tl.load(rows + 6 * num_rows + i)
    num_prompt_tokens = tl.load(rows + 5 * num_rows + i)
    if tl.load(rows + 3 * num_rows + i) != 0:
        for token in range(0, vocab_size, BLOCK):
            tl.store(counts + token + lanes, tl.zeros((BLOCK,), tl.int32), mask=token + lanes < vocab_size)
        tl.debug_barrier()
    for first in range(start, end, BLOCK):
        position = first + lanes
        place = counts + tl.load(tokens + position, mask=position < end, other=0)
        tl.atomic_or(place, 1, mask=(position < end) & (position < num_prompt_tokens), sem="relaxed")
        tl.atomic_add(place, 2, mask=(position < end) & (position >= num_prompt_tokens), sem="relaxed")


@triton.jit(do_not_specialize=["history_stride", "num_rows"])
def penalise_counted_kernel(
    logits, counts_ptr, vocab_size, history, history_stride, rows, num_rows, strengths, BLOCK: tl.constexpr
):
    """BLOCK tokens of the row of column i of `CountedRows.rows`.  Grid (num_rows, blocks of the vocabulary)."""
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    tokens = history + tl.load(rows + num_rows + i).to(tl.int64) * history_stride
    counts = counts_ptr + tl.load(rows + 2 * num_rows + i).to(tl.int64) * vocab_size
    count = tl.load(counts + token, mask=inside, other=0)
    for position in range(tl.load(rows + 6 * num_rows + i), tl.load(rows + 7 * num_rows + i)):
        count += tl.where(token == tl.load(tokens + position), 2, 0)
    seen = inside & (count > 0)
    place = logits + tl.load(rows + i).to(tl.int64) * vocab_size + token
    x = tl.load(place, mask=seen, other=0.0)
    repetition, frequency = tl.load(strengths + i), tl.load(strengths + num_rows + i)
    presence = tl.load(strengths + 2 * num_rows + i)
    tl.store(place, _penalised(x, repetition, frequency, presence, (count >> 1).to(tl.float32)), mask=seen)


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


def count_and_penalise(logits: Tensor, counted: CountedRows) -> None:
    """Count what has come since the last step, then penalise float32 logits[R, V], contiguous, in place."""
    counts, num_rows = counted.table.counts, counted.device_rows.shape[1]
    vocab_size = counts.shape[1]
    history = counted.history, counted.history.stride(0)
    columns = counted.device_rows, num_rows
    count_kernel[(num_rows,)](counts, vocab_size, *history, *columns, BLOCK=_COUNTED_BLOCK, num_warps=4)
    penalise_counted_kernel[(num_rows, triton.cdiv(vocab_size, _COUNTED_BLOCK))](
        logits,
        counts,
        vocab_size,
        *history,
        *columns,
        counted.strengths,
        BLOCK=_COUNTED_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
