"""Operations on the logits of a step that a device can have kernels for: their arguments, and their Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "CountedRow",
    "CountedRows",
    "MatchedWords",
    "PenalisedTokens",
    "SamplingOps",
    "TokenTable",
    "WordRow",
    "WordTable",
]

_FIRST_ROWS = 8


@dataclass(slots=True)
class PenalisedTokens:
    """N distinct (row, token) pairs of r rows.

    Attributes:
        ops: of the device.
        index: int64[N], row * V + token id.
        counts: float32[N], occurrences in the output.
        columns: int64[N], column of `strengths` that holds for each pair.
        strengths: float32[3, r], repetition, frequency and presence penalty.
    """

    ops: SamplingOps
    index: Tensor
    counts: Tensor
    columns: Tensor
    strengths: Tensor

    def apply(self, logits: Tensor) -> None:
        self.ops.penalise(logits, self)


class TokenTable:
    """How often each token occurs, for the slots that ask: a *count row* each, on the device.

    Attributes:
        counts: int32 [k, V]; twice the occurrences in the output, plus 1 if the token is in the prompt.  Rows are
            added as slots ask, and never given back to the device, whose memory is planned with all of them.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def grow(self, num_rows: int) -> None:
        """Have at least `num_rows` rows; the contents of new ones are undefined."""
        old = self.counts
        if num_rows > len(old):
            capacity = min(self._max_rows, max(num_rows, 2 * len(old), _FIRST_ROWS))
            self.counts = old.new_empty(capacity, old.shape[1])
            self.counts[: len(old)] = old


@dataclass(slots=True)
class CountedRow:
    """One of `CountedRows.rows`, field by line: what the kernel reads, too.

    Attributes:
        row: of the logits.
        slot: line of the history.
        count_row: line of the counts.
        clears: 1 if the count row belonged to another request.
        start: first token to count, up to `first_position`.
        num_prompt_tokens: tokens before it are the prompt's.
        first_position: tokens from there on are drafts.
        position: how many tokens there are before the one to sample.
    """

    row: int
    slot: int
    count_row: int
    clears: int
    start: int
    num_prompt_tokens: int
    first_position: int
    position: int


@dataclass(slots=True)
class CountedRows:
    """A `LogitsEdit` of r rows.

    Attributes:
        ops: of the device.
        table: its rows are brought up to date first.
        num_rows: count rows in use.
        history: int32 [slots, n] on the device.
        rows, device_rows: int32 [8, r], see `CountedRow`, on the host and on the device.
        strengths: float32 [3, r] on the device, contiguous; repetition, frequency and presence penalty.
    """

    ops: SamplingOps
    table: TokenTable
    num_rows: int
    history: Tensor
    rows: np.ndarray
    device_rows: Tensor
    strengths: Tensor

    def apply(self, logits: Tensor) -> None:
        self.table.grow(self.num_rows)
        self.ops.count_and_penalise(logits, self)


@dataclass(slots=True)
class WordTable:
    """The words of all slots on the device.

    Attributes:
        words: int32 [3, n]; of each word its last token, how many tokens are before it (its *head*), and where the head
            ends among the slot's tokens.
        tokens: int32 [m]; the tokens of all words, slot after slot.
        version: of the host's words that these are.
    """

    words: Tensor
    tokens: Tensor
    version: int = 0


@dataclass(slots=True)
class WordRow:
    """One of `MatchedWords.rows`, field by line: what the kernel reads, too.

    Attributes:
        row: of the logits.
        slot: line of the history.
        first_word, num_words: its part of the words.
        first_token: its first one among the words' tokens.
        num_prompt_tokens: heads are matched against the tokens behind these.
        position: how many tokens there are before the one to sample.
    """

    row: int
    slot: int
    first_word: int
    num_words: int
    first_token: int
    num_prompt_tokens: int
    position: int


@dataclass(slots=True)
class MatchedWords:
    """A `LogitsEdit` of r rows.

    Attributes:
        ops: of the device.
        table: the words, once `update` was taken over.
        update: a newer table, or None.
        history: int32 [slots, n] on the device.
        rows, device_rows: int32 [7, r], see `WordRow`, on the host and on the device.
        max_words, longest: most words of a row, and tokens of the longest head.
    """

    ops: SamplingOps
    table: WordTable
    update: WordTable | None
    history: Tensor
    rows: np.ndarray
    device_rows: Tensor
    max_words: int
    longest: int

    def apply(self, logits: Tensor) -> None:
        if self.update is not None:  # a copy: the upload is the next step's soon
            self.table.words, self.table.tokens = self.update.words.clone(), self.update.tokens.clone()
            self.table.version = self.update.version
        self.ops.ban_words(logits, self)


class SamplingOps(Protocol):
    """The operations of a sampling call that a device can have kernels for.  `ReferenceSampling` defines the results.

    All but `choose` change float32 logits[R, V], contiguous, in place.

    Attributes:
        draws: whether `choose` draws rows of every kind in one call; else `choose.py` draws them in groups.
        draws_masked: whether `choose` takes a `bitmask`.
        compiles: whether the first call of each operation compiles it; then `compile_ops` calls them all.
    """

    draws: bool
    draws_masked: bool
    compiles: bool

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: np.ndarray | None = None) -> Tensor:
        """int64[R]: one token per row of `logits[R, V]`, left unchanged, on the same device; only if `draws`.

        Args:
            columns: int64[COLUMN_LINES, C], see `SamplingMetadata.columns`; names each row at most once.  The
                result of a row that no column names is undefined.
            marks: give `unusable.NO_TOKEN` to rows whose largest logit is not finite; False if masks can have made
                it so, or with a `bitmask`, if the caller knows these rows.
            bitmask: only if `draws_masked`: int32[C, mask_words(V)] on the host, each column's allowed tokens, the
                first in the lowest bit.  A row that it leaves without a token gets token 0.
        """

    def mask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        """Set the logits of tokens whose bit is 0 to -inf.

        Args:
            rows: int64 [r], on the host, increasing.
            bitmask: int32 [r, mask_words(V)], on the host.
        """

    def penalise(self, logits: Tensor, penalised: PenalisedTokens) -> None:
        """Apply penalties to listed tokens."""

    def count_and_penalise(self, logits: Tensor, counted: CountedRows) -> None:
        """Count the tokens that have come since the last step, then apply penalties to all that were counted."""

    def ban_words(self, logits: Tensor, matched: MatchedWords) -> None:
        """Mask the last tokens of words whose other tokens end the output."""
