"""`bad_words_ids`: token sequences that must not appear in the output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.rules.base import BannedTokens, RowBatch, check_token_ids
from inflight.sampling.rules.ragged import RaggedRows, flatten_ranges
from inflight.sampling.rules.remembered import Remembered

__all__ = ["BadWords"]


class BadWords:
    """A `LogitsRule`: bans the last token of each word whose other tokens, its head, end the output.

    The words of all slots lie in one array in the order of a key: first the request, then the last
    token of the head, which is the token just before the banned one.  One binary search per row finds
    the words that may match, however many there are; only those are compared token by token.
    """

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = True
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(bad_words_ids=[[0]])

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # Keys, last tokens, lengths of the heads, and where the words start among the row's tokens.
        self._words = RaggedRows(max_num_seqs, np.int64, np.int32, np.int32, np.int32)
        self._tokens = RaggedRows(max_num_seqs, np.int32)
        # A request's key for words of one token; the word with t before its last token has 1 + t more.
        # Later requests have larger keys, so that rows appended to `_words` leave it sorted.
        self._first_key = np.zeros(max_num_seqs, dtype=np.int64)
        self._next_key = 0
        self._sorted_words = Remembered(self._checked_words)

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        if not any(params.bad_words_ids):
            return False
        tokens, (offsets, *columns) = self._sorted_words(params.bad_words_ids)
        self._words.set(slot, self._next_key + offsets, *columns)
        self._tokens.set(slot, tokens)
        self._first_key[slot] = self._next_key
        self._next_key += self._vocab_size + 1
        return True

    def _checked_words(self, bad_words_ids: list[list[int]]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The tokens of all words, and the columns of `_words` with keys that start at 0, in their order."""
        words = [word for word in bad_words_ids if word]
        sizes = np.fromiter(map(len, words), np.int64, len(words))
        tokens = np.fromiter(chain.from_iterable(words), np.int64)
        check_token_ids("bad_words_ids", tokens, self._vocab_size)
        ends = np.cumsum(sizes)
        offsets = np.where(sizes > 1, 1 + tokens[ends - 2], 0)
        order = np.argsort(offsets, kind="stable")
        columns = offsets, tokens[ends - 1], sizes - 1, ends - sizes
        return tokens, [column[order] for column in columns]

    def prepare(self, batch: RowBatch) -> BannedTokens | None:
        words, owners = self._candidates(batch)
        _, last_tokens, head_sizes, _ = self._words.columns
        # A head of one token has been compared by its key.
        longer = head_sizes[words] > 1
        if longer.any():
            matches = ~longer
            matches[longer] = self._head_matches(words[longer], batch.take(owners[longer]))
            words, owners = words[matches], owners[matches]
        if not len(words):
            return None
        index = last_tokens[words] + batch.rows[owners] * self._vocab_size
        return BannedTokens(batch.put(index))

    def _candidates(self, batch: RowBatch) -> tuple[np.ndarray, np.ndarray]:
        """Places in `_words` of what may match, and which of the batch's rows it concerns.

        These are words of one token, and words whose head fits into the output and ends as it does.
        """
        num_output_tokens = batch.positions - batch.num_prompt_tokens
        started = np.flatnonzero(num_output_tokens > 0)
        before = batch.token_ids[batch.slots[started], batch.positions[started] - 1]
        owners = np.concatenate([np.arange(len(batch.rows)), started])
        wanted = self._first_key[batch.slots[owners]]
        wanted[len(batch.rows) :] += 1 + before
        keys, _, head_sizes, _ = self._words.columns
        keys = keys[: self._words.end]
        starts = np.searchsorted(keys, wanted, "left")
        words, ranges = flatten_ranges(starts, np.searchsorted(keys, wanted, "right") - starts)
        owners = owners[ranges]
        fits = head_sizes[words] <= num_output_tokens[owners]
        return words[fits], owners[fits]

    def _head_matches(self, words: np.ndarray, batch: RowBatch) -> np.ndarray:
        """bool[n]: whether the head of `words[i]`, which is not empty, ends the output of row i."""
        _, _, head_sizes, word_starts = self._words.columns
        sizes = head_sizes[words]
        starts = self._tokens.starts[batch.slots] + word_starts[words]
        places, ranges = flatten_ranges(starts, sizes)
        positions = places + (batch.positions - sizes - starts)[ranges]
        equal = self._tokens.columns[0][places] == batch.token_ids[batch.slots[ranges], positions]
        return np.logical_and.reduceat(equal, np.cumsum(sizes) - sizes)
