"""A step's inputs in one launch, and its samples' way back in another: `runner/step_inputs.py` defines both.

One program handles one row from end to end, so that what it takes into the slot's token ids and block table is
there when it reads them: a barrier within the program is enough.  One more program writes the padding.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["make_inputs", "put_tokens"]

_BLOCK = 1024
_NUM_WARPS = 4
# Lines of `runner.step_inputs.Line`; slots are the first.
QUERY_START = tl.constexpr(1)
SEQ_LEN = tl.constexpr(2)
LOGITS_START = tl.constexpr(3)
BLOCKS_START = tl.constexpr(4)
FIRST_BLOCK = tl.constexpr(5)
TOKENS_START = tl.constexpr(6)
FIRST_TOKEN = tl.constexpr(7)


@triton.jit
def _take(values, lines, line_stride, STARTS: tl.constexpr, FIRST: tl.constexpr, table_row, row, BLOCK: tl.constexpr):
    """Write the row's part of `values` to `table_row`."""
    lanes = tl.arange(0, BLOCK)
    start = tl.load(lines + STARTS * line_stride + row)
    count = tl.load(lines + STARTS * line_stride + row + 1) - start
    target = table_row + tl.load(lines + FIRST * line_stride + row)
    for i in range(0, count, BLOCK):
        here = i + lanes < count
        tl.store(target + i + lanes, tl.load(values + start + i + lanes, mask=here), mask=here)


@triton.jit
def _pad(
    lines, line_stride, num_rows, num_tokens, num_logits, void_sample,
    input_ids, positions, slot_mapping, logits_indices, sample_indices, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries behind those of the last row."""
    lanes = tl.arange(0, BLOCK)
    for i in range(tl.load(lines + QUERY_START * line_stride + num_rows), num_tokens, BLOCK):
        here = i + lanes < num_tokens
        tl.store(input_ids + i + lanes, tl.zeros((BLOCK,), tl.int64), mask=here)
        tl.store(positions + i + lanes, tl.zeros((BLOCK,), tl.int64), mask=here)
        tl.store(slot_mapping + i + lanes, tl.full((BLOCK,), -1, tl.int64), mask=here)
    for i in range(tl.load(lines + LOGITS_START * line_stride + num_rows), num_logits, BLOCK):
        here = i + lanes < num_logits
        tl.store(logits_indices + i + lanes, tl.zeros((BLOCK,), tl.int64), mask=here)
        tl.store(sample_indices + i + lanes, tl.zeros((BLOCK,), tl.int64) + void_sample, mask=here)


@triton.jit(do_not_specialize=["line_stride", "num_rows", "num_tokens", "num_logits"])
def step_inputs_kernel(
    lines, line_stride, num_rows, num_tokens, num_logits, new_blocks, new_tokens,
    token_ids, max_model_len, block_table, max_blocks, void_sample,
    input_ids, positions, slot_mapping, row_blocks, logits_indices, sample_indices,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r makes the entries of row r, the last one the padding.  Grid (num_rows + 1,); lines as in `Line`."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if row == num_rows:
        _pad(
            lines, line_stride, num_rows, num_tokens, num_logits, void_sample,
            input_ids, positions, slot_mapping, logits_indices, sample_indices, BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(lines + row).to(tl.int64)
        own_tokens, own_blocks = token_ids + slot * max_model_len, block_table + slot * max_blocks
        _take(new_blocks, lines, line_stride, BLOCKS_START, FIRST_BLOCK, own_blocks, row, BLOCK)
        _take(new_tokens, lines, line_stride, TOKENS_START, FIRST_TOKEN, own_tokens, row, BLOCK)
        tl.debug_barrier()
        query_start = tl.load(lines + QUERY_START * line_stride + row)
        query_end = tl.load(lines + QUERY_START * line_stride + row + 1)
        seq_len = tl.load(lines + SEQ_LEN * line_stride + row)
        for i in range(query_start, query_end, BLOCK):
            token = i + lanes
            here = token < query_end
            position = seq_len - query_end + token
            block = tl.load(own_blocks + position // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
            tl.store(input_ids + token, tl.load(own_tokens + position, mask=here, other=0).to(tl.int64), mask=here)
            tl.store(positions + token, position.to(tl.int64), mask=here)
            tl.store(slot_mapping + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=here)
        for i in range(0, tl.cdiv(seq_len, BLOCK_SIZE), BLOCK):
            here = i + lanes < tl.cdiv(seq_len, BLOCK_SIZE)
            blocks = tl.load(own_blocks + i + lanes, mask=here)
            tl.store(row_blocks + row.to(tl.int64) * max_blocks + i + lanes, blocks, mask=here)
        logits_start = tl.load(lines + LOGITS_START * line_stride + row)
        logits_end = tl.load(lines + LOGITS_START * line_stride + row + 1)
        for i in range(logits_start, logits_end, BLOCK):
            here = i + lanes < logits_end
            behind = logits_end - i - lanes
            tl.store(logits_indices + i + lanes, (query_end - behind).to(tl.int64), mask=here)
            tl.store(sample_indices + i + lanes, slot * max_model_len + seq_len - behind + 1, mask=here)


@triton.jit(do_not_specialize=["num_samples"])
def put_tokens_kernel(token_ids, sample_indices, sampled, num_samples, BLOCK: tl.constexpr):
    """`token_ids`, flat, takes BLOCK of the int64 `sampled`; 0 for negative ones."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < num_samples
    place = tl.load(sample_indices + i, mask=here, other=0)
    token = tl.maximum(tl.load(sampled + i, mask=here, other=0), 0)
    tl.store(token_ids + place, token.to(tl.int32), mask=here)


def make_inputs(size: Any, lines: Tensor, new_blocks: Tensor, new_tokens: Tensor, state: Any, out: Any) -> None:
    """See `runner.step_inputs.make_inputs`, also for the types."""
    slots, max_model_len = state.token_ids.shape
    step_inputs_kernel[(size.rows + 1,)](
        lines,
        lines.stride(0),
        size.rows,
        size.tokens,
        size.logits,
        new_blocks,
        new_tokens,
        state.token_ids,
        max_model_len,
        state.block_table,
        state.block_table.shape[1],
        (slots - 1) * max_model_len,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.block_table,
        out.logits_indices,
        out.sample_indices,
        BLOCK_SIZE=state.block_size,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def put_tokens(token_ids: Tensor, sample_indices: Tensor, sampled: Tensor) -> None:
    """See `runner.step_inputs.put_tokens`."""
    num_samples = len(sampled)
    put_tokens_kernel[(triton.cdiv(num_samples, _BLOCK),)](
        token_ids, sample_indices, sampled, num_samples, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
