"""Repetition, frequency and presence penalties over a history that is on the device, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.ops import CountedRows, TokenTable
from inflight.sampling.rules.base import RowBatch

__all__ = ["DevicePenalties"]

_NONE = 1.0, 0.0, 0.0


class DevicePenalties:
    """A `LogitsRule` that equals `Penalties`, operation by operation, and uploads a few numbers a row.

    A slot's count row holds its tokens before its first position in the last step.  Later tokens are
    counted, on the device, when the next step's edit is applied; drafts are counted for the rows behind them only.
    """

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(repetition_penalty=2.0)

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._table = TokenTable(max_num_seqs, vocab_size, device)
        self._strengths = np.tile(np.array([_NONE], dtype=np.float32).T, max_num_seqs)
        self._count_row = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_counted = np.zeros(max_num_seqs, dtype=np.int64)  # leading tokens; -1: the count row is not cleared
        self._free: list[int] = []
        self._num_rows = 0

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        strengths = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._strengths[:, slot] = strengths
        if self._count_row[slot] >= 0:
            self._free.append(int(self._count_row[slot]))
            self._count_row[slot] = -1
        if strengths == _NONE:
            return False
        if not self._free:
            self._free.append(self._num_rows)
            self._num_rows += 1
        self._count_row[slot] = self._free.pop()
        self._num_counted[slot] = -1
        return True

    def prepare(self, batch: RowBatch) -> CountedRows:
        assert batch.history is not None, "the caller keeps no tokens on the device"
        counted = self._num_counted[batch.slots]
        self._num_counted[batch.slots] = batch.first_positions
        # The prompt's tokens count for the repetition penalty only.
        start = np.where(self._strengths[0, batch.slots] != 1.0, 0, batch.num_prompt_tokens)
        # Rows behind a slot's first one have nothing left to count.
        first = np.diff(batch.slots, prepend=-1) != 0
        clears = first & (counted < 0)
        rows = np.stack(
            [
                batch.rows,
                batch.slots,
                self._count_row[batch.slots],
                clears,
                np.where(clears, start, np.where(first, counted, batch.first_positions)),
                batch.num_prompt_tokens,
                batch.first_positions,
                batch.positions,
            ]
        ).astype(np.int32)
        strengths = batch.put(np.ascontiguousarray(self._strengths[:, batch.slots]))
        return CountedRows(batch.ops, self._table, self._num_rows, batch.history, rows, batch.put(rows), strengths)
