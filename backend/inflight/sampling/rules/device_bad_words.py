"""`bad_words_ids` matched against a history that is on the device: no step waits for the tokens of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.ops import MatchedWords, WordTable
from inflight.sampling.rules.base import RowBatch, check_token_ids
from inflight.sampling.rules.ragged import RaggedRows
from inflight.sampling.rules.remembered import Remembered

__all__ = ["DeviceBadWords"]


class DeviceBadWords:
    """A `LogitsRule` that equals `BadWords`.  The words go to the device when a request enters, not with each step."""

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(bad_words_ids=[[0]])

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self._table = WordTable(nothing.view(3, 0), nothing)
        self._words = RaggedRows(max_num_seqs, np.int32, np.int32, np.int32)  # the lines of `WordTable.words`
        self._tokens = RaggedRows(max_num_seqs, np.int32)
        self._longest = np.zeros(max_num_seqs, dtype=np.int64)  # head of each slot
        self._version = 0
        self._columns = Remembered(self._checked_words)

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        if not any(params.bad_words_ids):
            return False
        tokens, last_tokens, head_sizes, ends = self._columns(params.bad_words_ids)
        self._words.set(slot, last_tokens, head_sizes, ends)
        self._tokens.set(slot, tokens)
        self._longest[slot] = head_sizes.max()
        self._version += 1
        return True

    def _checked_words(self, bad_words_ids: list[list[int]]) -> tuple[np.ndarray, ...]:
        """The tokens of all words, and the columns of `_words`."""
        words = [word for word in bad_words_ids if word]
        sizes = np.fromiter(map(len, words), np.int64, len(words))
        tokens = np.fromiter(chain.from_iterable(words), np.int64)
        check_token_ids("bad_words_ids", tokens, self._vocab_size)
        last = np.cumsum(sizes) - 1
        return tokens, tokens[last], sizes - 1, last

    def prepare(self, batch: RowBatch) -> MatchedWords:
        assert batch.history is not None, "the caller keeps no tokens on the device"
        slots, sizes = batch.slots, self._words.sizes[batch.slots]
        rows = np.stack(
            [
                batch.rows,
                slots,
                self._words.starts[slots],
                sizes,
                self._tokens.starts[slots],
                batch.num_prompt_tokens,
                batch.positions,
            ]
        ).astype(np.int32)
        update = None
        if self._table.version != self._version:
            words = np.stack([column[: self._words.end] for column in self._words.columns])
            tokens = self._tokens.columns[0][: self._tokens.end]
            update = WordTable(batch.put(words), batch.put(tokens), self._version)
        longest = int(self._longest[slots].max())
        widths = int(sizes.max()), longest
        return MatchedWords(batch.ops, self._table, update, batch.history, rows, batch.put(rows), *widths)
