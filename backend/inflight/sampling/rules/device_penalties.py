"""Repetition, frequency and presence penalties over a history that is on the device, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import can_launch
from inflight.sampling.rules.base import RowBatch
from inflight.sampling.rules.penalties import penalised

__all__ = ["CountedRow", "CountedRows", "DevicePenalties", "TokenTable"]

_NONE = 1.0, 0.0, 0.0
_FIRST_ROWS = 8


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


class DevicePenalties:
    """A `LogitsRule` that equals `Penalties`, operation by operation, and uploads a few numbers a row.

    A slot's count row holds its tokens before its first position in the last step.  Those that have come since are
    counted, on the device, when the next step's edit is applied; drafts are counted for the rows behind them only.
    """

    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(repetition_penalty=2.0)

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._table = TokenTable(max_num_seqs, vocab_size, device)
        self._strengths = np.tile(np.array([_NONE], dtype=np.float32).T, max_num_seqs)
        self._count_row = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_counted = np.zeros(max_num_seqs, dtype=np.int64)  # leading tokens; -1: the count row is not cleared
        self._free: list[int] = []
        self._num_rows = 0

    def set_row(self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> bool:
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
        return CountedRows(self._table, self._num_rows, batch.history, rows, batch.put(rows), strengths)


@dataclass(slots=True)
class CountedRow:
    """One of `CountedRows.rows`, field by line: what the kernel reads, too.

    Attributes:
        row: of the logits.
        slot: line of the history.
        count_row: line of the counts.
        clears: 1 if the count row belonged to another request.
        start: first token to count, up to `first_position`.
        num_prompt_tokens: those before it are the prompt's.
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
        table: whose rows are brought up to date first.
        num_rows: count rows in use.
        history: int32 [slots, n] on the device.
        rows, device_rows: int32 [8, r], see `CountedRow`, on the host and on the device.
        strengths: float32 [3, r] on the device, contiguous; repetition, frequency and presence penalty.
    """

    table: TokenTable
    num_rows: int
    history: Tensor
    rows: np.ndarray
    device_rows: Tensor
    strengths: Tensor

    def apply(self, logits: Tensor) -> None:
        self.table.grow(self.num_rows)
        if can_launch(logits.device):
            from inflight.kernels.gpu import gpu_penalties

            gpu_penalties.count_and_penalise(logits, self)
            return
        rows = [CountedRow(*column) for column in self.rows.T.tolist()]
        for row in rows:
            self._count(row)
        for column, row in enumerate(rows):
            counts, tokens = self.table.counts[row.count_row], self.history[row.slot].long()
            drafts = tokens[row.first_position : row.position]
            counts = counts.index_add(0, drafts, counts.new_full((len(drafts),), 2))
            x = penalised(logits[row.row], self.strengths[:, column], (counts >> 1).float())
            logits[row.row] = torch.where(counts > 0, x, logits[row.row])

    def _count(self, row: CountedRow) -> None:
        counts, tokens = self.table.counts[row.count_row], self.history[row.slot]
        if row.clears:
            counts.zero_()
        prompt = tokens[row.start : min(row.num_prompt_tokens, row.first_position)].long()
        counts.index_fill_(0, prompt, 1)
        output = tokens[max(row.start, row.num_prompt_tokens) : row.first_position].long()
        counts.index_add_(0, output, counts.new_full((len(output),), 2))
