"""A step's inputs, made on the device from the host's numbers per row and the device's state per slot.

    from the host, a few numbers a row     on the device, by slot       made by one kernel
    slot, query_start_loc, seq_len,        token_ids                    input_ids, positions, slot_mapping,
    new blocks, new tokens             +   block_table             ->   block_table by row, logits_indices,
                                                                        where samples go in token_ids

`make_inputs` launches the kernel on a GPU (`kernels/gpu/gpu_step_inputs.py`); elsewhere it runs the kernel's definition
in torch.  Neither reads a device tensor on the host.  Both take sizes above the step's, for CUDA graphs: rows that are
added have no tokens and belong to the void slot, tokens that are added have id 0, position 0 and slot_mapping -1, and
samples that are added go to the void slot.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kernels.gpu.launch import can_launch

__all__ = ["DeviceState", "Line", "StepInputTensors", "StepSize", "make_inputs", "put_tokens"]


class Line(enum.IntEnum):
    """Lines of the rows' numbers, int32 [len(Line), rows + 1] (or wider); "starts" have rows + 1 entries.

    SLOT: of each row; max_num_seqs, the void slot, for rows that are added.
    QUERY_START: `query_start_loc`.
    SEQ_LEN: `seq_lens`; 0 for rows that are added.
    LOGITS_START: where the row's logits start among the step's N; the row's are for its last tokens.
    BLOCKS_START, FIRST_BLOCK: the row's part of the new blocks, and its first one's place in the block table.
    TOKENS_START, FIRST_TOKEN: the row's part of the new tokens, and its first one's position.
    """

    SLOT = 0
    QUERY_START = 1
    SEQ_LEN = 2
    LOGITS_START = 3
    BLOCKS_START = 4
    FIRST_BLOCK = 5
    TOKENS_START = 6
    FIRST_TOKEN = 7


@dataclass(frozen=True, slots=True)
class StepSize:
    """Sizes with which a step's kernels are launched; a CUDA graph's are its bucket's.

    Attributes:
        rows, tokens, logits: at least as many as the step has.
        query_len: at least as many tokens as each row has.
        new_tokens: tokens that come from the host: of rows that enter, and drafts; at least as many as the step has.
        prompt_blocks: room for new blocks of rows with more than a token, in a bucket for such rows.
        adapted: rows have adapters (LoRA), so that the model launches more.
    """

    rows: int
    tokens: int
    logits: int
    query_len: int
    new_tokens: int = 0
    prompt_blocks: int = 0
    adapted: bool = False

    @property
    def new_blocks(self) -> int:
        """Blocks for which there is room in any case: one for each row, and for each token with logits."""
        return max(self.rows, self.logits, self.prompt_blocks)

    def holds(self, size: StepSize) -> bool:
        """Whether a step of `size`, padded, has this size."""
        return (
            size.rows <= self.rows
            and size.tokens <= self.tokens
            and size.logits <= self.logits
            and size.query_len <= self.query_len
            and size.new_tokens <= self.new_tokens
        )


@dataclass(slots=True)
class DeviceState:
    """The device's copy of the requests that hold a slot.  The last slot is void: padding reads and writes it.

    Attributes:
        token_ids: int32 [max_num_seqs + 1, max_model_len + 1]; prompt and output, then drafts, void behind them.
        block_table: int32 [max_num_seqs + 1, blocks of max_model_len].
        block_size: tokens per block.
    """

    token_ids: Tensor
    block_table: Tensor
    block_size: int

    @classmethod
    def allocate(cls, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> DeviceState:
        slots, max_blocks = max_num_seqs + 1, -(-max_model_len // block_size)
        return cls(
            torch.zeros(slots, max_model_len + 1, dtype=torch.int32, device=device),
            torch.zeros(slots, max_blocks, dtype=torch.int32, device=device),
            block_size,
        )


@dataclass(slots=True)
class StepInputTensors:
    """The output of `make_inputs`, at addresses that never change; a step uses the leading entries.

    Attributes:
        input_ids, positions, slot_mapping: int64 [max_num_batched_tokens].
        block_table: int32 [max_num_seqs, blocks of max_model_len], by row; entries past a row's end are undefined.
        logits_indices: int64 [max_num_batched_tokens]; the token of each of the step's logits.
        sample_indices: int64, as many; where the token sampled from it goes in `token_ids`, flat.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    logits_indices: Tensor
    sample_indices: Tensor

    @classmethod
    def allocate(cls, max_num_tokens: int, state: DeviceState) -> StepInputTensors:
        def column() -> Tensor:
            return torch.zeros(max_num_tokens, dtype=torch.int64, device=state.token_ids.device)

        by_row = torch.zeros_like(state.block_table[:-1])
        return cls(column(), column(), column(), by_row, column(), column())


def make_inputs(
    size: StepSize, lines: Tensor, new_blocks: Tensor, new_tokens: Tensor, state: DeviceState, out: StepInputTensors
) -> None:
    """Write the step's new blocks and tokens to `state`, then write its inputs to `out`.

    Args:
        lines: int32 [len(Line), size.rows + 1 or more].
        new_blocks, new_tokens: int32, row after row; entries behind the last row's are ignored.
    """
    if can_launch(lines.device):
        from inflight.kernels.gpu import gpu_step_inputs

        gpu_step_inputs.make_inputs(size, lines, new_blocks, new_tokens, state, out)
        return
    slots = lines[Line.SLOT, : size.rows].long()
    _take(new_tokens, lines, Line.TOKENS_START, Line.FIRST_TOKEN, slots, state.token_ids)
    _take(new_blocks, lines, Line.BLOCKS_START, Line.FIRST_BLOCK, slots, state.block_table)
    out.block_table[: size.rows] = state.block_table[slots]
    seq_lens, void = lines[Line.SEQ_LEN, : size.rows].long(), len(state.token_ids) - 1

    row, real, behind = _rows_of(lines, Line.QUERY_START, size.rows, size.tokens)
    position = torch.where(real, seq_lens[row] - behind, 0)
    slot = torch.where(real, slots[row], void)
    block = state.block_table[slot, position // state.block_size].long()
    out.input_ids[: size.tokens] = torch.where(real, state.token_ids[slot, position], 0)
    out.positions[: size.tokens] = position
    out.slot_mapping[: size.tokens] = torch.where(real, block * state.block_size + position % state.block_size, -1)

    row, real, behind = _rows_of(lines, Line.LOGITS_START, size.rows, size.logits)
    ends = lines[Line.QUERY_START, 1 : size.rows + 1].long()
    out.logits_indices[: size.logits] = torch.where(real, ends[row] - behind, 0)
    width = state.token_ids.shape[1]
    sample = slots[row] * width + seq_lens[row] - behind + 1
    out.sample_indices[: size.logits] = torch.where(real, sample, void * width)


def put_tokens(token_ids: Tensor, sample_indices: Tensor, sampled: Tensor) -> None:
    """Write sampled tokens, int64 [N], to `DeviceState.token_ids`, flat at int64 [N] `sample_indices`.

    A row without a token has a negative one, for which 0 is written: a step launched ahead may embed it.
    """
    if can_launch(token_ids.device):
        from inflight.kernels.gpu import gpu_step_inputs

        gpu_step_inputs.put_tokens(token_ids, sample_indices, sampled)
        return
    token_ids.view(-1)[sample_indices] = sampled.clamp(min=0).to(torch.int32)


def _rows_of(lines: Tensor, starts: Line, rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The row of each of `count` entries, whether it has one, and how far it is before the row's end; 1 is the last."""
    entry = torch.arange(count, dtype=torch.int32, device=lines.device)
    ends = lines[starts, 1 : rows + 1].contiguous()
    row = torch.searchsorted(ends, entry, right=True)
    real, row = row < rows, row.clamp(max=rows - 1)
    return row, real, (ends[row] - entry).long()


def _take(values: Tensor, lines: Tensor, starts: Line, first: Line, slots: Tensor, table: Tensor) -> None:
    """Write each row's part of `values` to its slot's line of `table`, from its place `first` on."""
    if not len(values):
        return
    rows = len(slots)
    row, real, behind = _rows_of(lines, starts, rows, len(values))
    counts = (lines[starts, 1 : rows + 1] - lines[starts, :rows]).long()
    place = lines[first, :rows].long()[row] + counts[row] - behind
    table[torch.where(real, slots[row], len(table) - 1), torch.where(real, place, 0)] = values
