"""Masks logits by the bits of a mask, in one kernel launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["apply"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_words"])
def apply_bitmask_kernel(logits, vocab_size, rows, bitmask, num_words, BLOCK: tl.constexpr):
    """BLOCK tokens of row rows[i] of the logits.  Grid (rows, blocks of tokens)."""
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + i * num_words + token // 32, mask=token < vocab_size, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    place = logits + tl.load(rows + i) * vocab_size + token
    tl.store(place, tl.full((BLOCK,), -float("inf"), tl.float32), mask=banned & (token < vocab_size))


def apply(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Mask float32 logits[R, V], contiguous, in place.

    Args:
        rows: int64 [r], on the device.
        bitmask: int32 [r, words], contiguous, on the device; bit b of word w is token 32 w + b.
    """
    grid = len(rows), triton.cdiv(logits.shape[1], _BLOCK)
    apply_bitmask_kernel[grid](logits, logits.shape[1], rows, bitmask, bitmask.shape[1], BLOCK=_BLOCK, num_warps=4)
