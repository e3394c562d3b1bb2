"""Bans the last tokens of bad words whose other tokens end the output, in one kernel launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inflight.sampling.ops import MatchedWords

__all__ = ["ban"]

_BLOCK = 128


@triton.jit(do_not_specialize=["history_stride", "num_rows", "num_words", "longest"])
def ban_words_kernel(
    logits, vocab_size, history, history_stride, rows, num_rows, words, num_words, tokens, longest, BLOCK: tl.constexpr
):
    """BLOCK words of the row of column i of `MatchedWords.rows`.  Grid (num_rows, blocks of words)."""
    i = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < tl.load(rows + 3 * num_rows + i)
    word += tl.load(rows + 2 * num_rows + i)
    last = tl.load(words + word, mask=inside, other=0)
    size = tl.load(words + num_words + word, mask=inside, other=0)
    end = tl.load(words + 2 * num_words + word, mask=inside, other=0) + tl.load(rows + 4 * num_rows + i)
    position = tl.load(rows + 6 * num_rows + i)
    matches = inside & (size <= position - tl.load(rows + 5 * num_rows + i))
    output = history + tl.load(rows + num_rows + i).to(tl.int64) * history_stride + position
    for back in range(1, longest + 1):
        wanted = tl.load(tokens + end - back, mask=matches & (back <= size), other=-1)
        found = tl.load(output - back, mask=back <= position, other=-1)
        matches = matches & ((back > size) | (wanted == found))
    place = logits + tl.load(rows + i).to(tl.int64) * vocab_size + last
    tl.store(place, tl.full((BLOCK,), -float("inf"), tl.float32), mask=matches)


def ban(logits: Tensor, matched: MatchedWords) -> None:
    """Mask the tokens in float32 logits[R, V], contiguous, in place."""
    rows, words = matched.device_rows, matched.table.words
    num_rows = rows.shape[1]
    ban_words_kernel[(num_rows, triton.cdiv(matched.max_words, _BLOCK))](
        logits,
        logits.shape[1],
        matched.history,
        matched.history.stride(0),
        rows,
        num_rows,
        words,
        words.shape[1],
        matched.table.tokens,
        matched.longest,
        BLOCK=_BLOCK,
        num_warps=4,
    )
