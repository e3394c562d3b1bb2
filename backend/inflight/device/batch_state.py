"""Batch state: a struct of arrays on the host, indexed by slot.

The scheduler says what changed; a step's tensors come out of these arrays by indexing, with no Python per
token.  Positions come from the schedule, never from tokens that arrived: block tables change when a step
is prepared, possibly while the step before it runs, tokens only while a step is executed.

    slot   token_ids                      block_table
    0      [ 12  7  7 31  .  .  . ]       [ 4  9  .  . ]      . = void
    1      [ 12  7  2  .  .  .  . ]       [ 4  2  .  . ]      (block 4 is a shared prefix)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata
from inflight.device.upload import upload
from inflight.engine.step import SchedulerOutput

__all__ = ["BatchState", "StepInputs"]


@dataclass(slots=True)
class StepInputs:
    """One ragged forward pass over T tokens of R requests, without the tokens themselves.

    Attributes:
        slot_of_token, position_of_token: int64 [T] on the host.
        row_of_logits, logits_indices: int64 [N] on the host; the row, and the token among T, of each of the N
            logits to sample from: of a row that samples, its last known token and its drafts.
        positions: int64 [1, T] on the device.
        metadata: what attention needs.
    """

    slot_of_token: np.ndarray
    position_of_token: np.ndarray
    row_of_logits: np.ndarray
    logits_indices: np.ndarray
    positions: Tensor
    metadata: AttentionMetadata


class BatchState:
    """The tokens and block tables of the requests that hold a slot.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len]; prompt and output, then drafts, void behind them.
        num_prompt_tokens: int64 [max_num_seqs].
        block_table: int32 [max_num_seqs, blocks of max_model_len].
        num_blocks: int64 [max_num_seqs]; valid entries of each slot's block table.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)  # one void, of a pooled prompt
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, out: SchedulerOutput) -> None:
        """Bring the block tables up to the scheduler's view.  May come before the step before has run."""
        for slot, num_blocks in out.num_kept_blocks.items():
            self.num_blocks[slot] = num_blocks
        for row in out.new_rows:
            self.num_blocks[row.slot] = 0
            self._append_blocks(row.slot, row.block_ids)
        for slot, block_ids in out.new_block_ids.items():
            self._append_blocks(slot, block_ids)

    def fill_rows(self, out: SchedulerOutput) -> None:
        """Take the tokens of rows that enter, and drafts.  After the step before, which writes to their slots."""
        for row in out.new_rows:
            token_ids = np.frombuffer(row.token_ids, dtype=np.int32)
            self.token_ids[row.slot, : len(token_ids)] = token_ids
            self.num_prompt_tokens[row.slot] = row.num_prompt_tokens
        for index, drafts in out.draft_token_ids.items():
            end = out.num_computed_tokens[index] + out.num_scheduled_tokens[index]
            self.token_ids[out.slots[index], end - len(drafts) : end] = drafts

    def put_tokens(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Write sampled tokens; all arrays are [N].  Tokens behind a refused draft are void."""
        self.token_ids[slots, positions] = token_ids

    def step_inputs(self, out: SchedulerOutput) -> StepInputs:
        """Where the step's tokens are; call `apply` first."""
        slots = np.asarray(out.slots, dtype=np.int64)
        counts = np.asarray(out.num_scheduled_tokens, dtype=np.int64)
        computed = np.asarray(out.num_computed_tokens, dtype=np.int64)
        query_start_loc = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        seq_lens = (computed + counts).astype(np.int32)

        row_of_token = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(out.num_tokens) + (computed - query_start_loc[:-1])[row_of_token]
        slot_of_token = slots[row_of_token]
        blocks = self.block_table[slot_of_token, positions // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + positions % self.block_size

        max_seq_len = int(seq_lens.max())
        block_table = self.block_table[slots, : -(-max_seq_len // self.block_size)]
        metadata = AttentionMetadata(
            query_start_loc=upload(query_start_loc, self.device),
            seq_lens=upload(seq_lens, self.device),
            block_table=upload(block_table, self.device),
            slot_mapping=upload(slot_mapping, self.device),
            query_start_loc_cpu=query_start_loc.tolist(),
            seq_lens_cpu=seq_lens.tolist(),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            block_size=self.block_size,
        )
        row_of_logits, logits_indices = _logits_indices(out, query_start_loc)
        return StepInputs(
            slot_of_token, positions, row_of_logits, logits_indices, upload(positions, self.device)[None], metadata
        )

    def input_ids(self, inputs: StepInputs) -> Tensor:
        """The step's tokens, int64 [1, T]; call `fill_rows` first."""
        ids = self.token_ids[inputs.slot_of_token, inputs.position_of_token].astype(np.int64)
        return upload(ids, self.device)[None]

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        start = self.num_blocks[slot]
        self.block_table[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] += len(block_ids)


def _logits_indices(out: SchedulerOutput, query_start_loc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row and the token of each of the N logits to sample from, int64 [N] both; `query_start_loc` is [R + 1]."""
    rows = np.flatnonzero(out.samples)
    last = query_start_loc[1:].astype(np.int64)[rows] - 1
    if not out.draft_token_ids:
        return rows, last
    num_drafts = np.array([len(out.draft_token_ids.get(row, ())) for row in rows.tolist()], dtype=np.int64)
    rows, last, num_drafts = (np.repeat(values, num_drafts + 1) for values in (rows, last, num_drafts))
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)  # 0 at a row's last known token
    return rows, last - num_drafts + place
