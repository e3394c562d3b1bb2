"""Batch state: a struct of arrays on the host, one row per request slot.

The scheduler says what changed; a step's tensors come out of these arrays by indexing, with no
Python per token.  Block tables change when a step is prepared, which may be while the step before it
runs; tokens change only while a step is executed.

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
from inflight.engine.step import SchedulerOutput

__all__ = ["BatchState", "StepInputs"]


@dataclass(slots=True)
class StepInputs:
    """One ragged forward pass over T tokens of R requests, without the tokens themselves.

    Attributes:
        slot_of_token, position_of_token: int64 [T] on the host.
        positions: int64 [1, T] on the device.
        metadata: what attention needs.
    """

    slot_of_token: np.ndarray
    position_of_token: np.ndarray
    positions: Tensor
    metadata: AttentionMetadata


class BatchState:
    """Rows of the requests that hold a slot.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len]; prompt and output, void past `num_tokens`.
        num_tokens: int64 [max_num_seqs].
        num_prompt_tokens: int64 [max_num_seqs].
        block_table: int32 [max_num_seqs, blocks of max_model_len].
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, out: SchedulerOutput) -> None:
        """Bring the block tables up to the scheduler's view.  Before the step before has run, if need be."""
        for row in out.new_rows:
            self._num_blocks[row.slot] = 0
            self._append_blocks(row.slot, row.block_ids)
        for slot, block_ids in out.new_block_ids.items():
            self._append_blocks(slot, block_ids)

    def fill_rows(self, out: SchedulerOutput) -> None:
        """Take the tokens of the rows that enter.  After the step before: it may append to their slots."""
        for row in out.new_rows:
            self.token_ids[row.slot, : len(row.token_ids)] = row.token_ids
            self.num_tokens[row.slot] = len(row.token_ids)
            self.num_prompt_tokens[row.slot] = row.num_prompt_tokens

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token to each of the rows `slots`."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def step_inputs(self, out: SchedulerOutput) -> StepInputs:
        """Where the step's tokens are; call `apply` first."""
        slots = np.asarray(out.slots, dtype=np.int64)
        counts = np.asarray(out.num_scheduled_tokens, dtype=np.int64)
        computed = np.asarray(out.num_computed_tokens, dtype=np.int64)
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        lens = (computed + counts).astype(np.int32)

        row_of_token = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(out.total_tokens) + (computed - starts[:-1])[row_of_token]
        slot_of_token = slots[row_of_token]
        blocks = self.block_table[slot_of_token, positions // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + positions % self.block_size

        max_seq_len = int(lens.max())
        block_table = self.block_table[slots, : -(-max_seq_len // self.block_size)]
        metadata = AttentionMetadata(
            query_start_loc=self._to_device(starts),
            seq_lens=self._to_device(lens),
            block_table=self._to_device(block_table),
            slot_mapping=self._to_device(slot_mapping),
            query_start_loc_cpu=starts.tolist(),
            seq_lens_cpu=lens.tolist(),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            block_size=self.block_size,
        )
        return StepInputs(slot_of_token, positions, self._to_device(positions)[None], metadata)

    def input_ids(self, inputs: StepInputs) -> Tensor:
        """The step's tokens, int64 [1, T]; call `fill_rows` first."""
        ids = self.token_ids[inputs.slot_of_token, inputs.position_of_token].astype(np.int64)
        return self._to_device(ids)[None]

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        start = self._num_blocks[slot]
        self.block_table[slot, start : start + len(block_ids)] = block_ids
        self._num_blocks[slot] += len(block_ids)

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
