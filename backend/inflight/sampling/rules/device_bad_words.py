"""`bad_words_ids` matched against a history that is on the device: no step waits for the tokens of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import can_launch
from inflight.sampling.rules.base import RowBatch, check_token_ids
from inflight.sampling.rules.ragged import RaggedRows
from inflight.sampling.rules.remembered import Remembered

__all__ = ["DeviceBadWords", "MatchedWords", "WordRow", "WordTable"]


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


class DeviceBadWords:
    """A `LogitsRule` that equals `BadWords`.  The words go to the device when a request enters, not with each step."""

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

    def set_row(self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> bool:
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
        return MatchedWords(self._table, update, batch.history, rows, batch.put(rows), int(sizes.max()), longest)


@dataclass(slots=True)
class WordRow:
    """One of `MatchedWords.rows`, field by line: what the kernel reads, too.

    Attributes:
        row: of the logits.
        slot: line of the history.
        first_word, num_words: its part of the words.
        first_token: its first one among the words' tokens.
        num_prompt_tokens: heads are matched against what is behind these.
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
        table: the words, once `update` was taken over.
        update: a newer table, or None.
        history: int32 [slots, n] on the device.
        rows, device_rows: int32 [7, r], see `WordRow`, on the host and on the device.
        max_words, longest: most words of a row, and tokens of the longest head.
    """

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
        if can_launch(logits.device):
            from inflight.kernels.gpu import gpu_bad_words

            gpu_bad_words.ban(logits, self)
            return
        for column in self.rows.T.tolist():
            row = WordRow(*column)
            words = self.table.words[:, row.first_word : row.first_word + row.num_words]
            last, sizes, ends = words.long()
            back = torch.arange(1, self.longest + 1, device=logits.device)
            wanted = self.table.tokens[(row.first_token + ends[:, None] - back).clamp(min=0)]
            equal = wanted == self.history[row.slot, (row.position - back).clamp(min=0)]
            matches = (equal | (back > sizes[:, None])).all(1) & (sizes <= row.position - row.num_prompt_tokens)
            bans = torch.where(matches, -torch.inf, torch.inf)
            logits[row.row].scatter_reduce_(0, last, bans, "amin")
