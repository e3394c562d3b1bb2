"""Device functions of `gpu_attention_kernel.py`: which query block a program computes, and reading tiles of the pool.

Query blocks are numbered without the host: request r has those from query_start_loc[r] // BLOCK_Q + r on, at most
T // BLOCK_Q + R in total, and a binary search finds the request of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_ids", "load_rows", "locate", "splits_in_use", "tile_pointers", "visible_tiles"]


@triton.jit
def _request_of_block(query_start_loc, block, num_requests, BLOCK_Q: tl.constexpr):
    """The last request whose first query block is at most `block`."""
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def locate(query_start_loc, seq_lens, block, num_requests, BLOCK_Q: tl.constexpr, ONE_BLOCK_EACH: tl.constexpr):
    """The query block `block`.

    Returns (request, the request's tokens in this step, its tokens in total, the batch row of the block's first
    token, that token's position, number of tokens in the block: <= 0 if there is no such block).
    """
    if ONE_BLOCK_EACH:
        request = block
        start = tl.load(query_start_loc + request)
        offset = 0
    else:
        request = _request_of_block(query_start_loc, block, num_requests, BLOCK_Q)
        start = tl.load(query_start_loc + request)
        offset = (block - (start // BLOCK_Q + request)) * BLOCK_Q
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    num_tokens = tl.minimum(query_len - offset, BLOCK_Q)
    return request, query_len, seq_len, start + offset, seq_len - query_len + offset, num_tokens


@triton.jit
def splits_in_use(tiles, split_tiles, num_splits):
    """Number of splits that have tiles; the last one takes all that remain."""
    return tl.minimum(tl.maximum(tl.cdiv(tiles, split_tiles), 1), num_splits)


@triton.jit
def visible_tiles(first_position, end_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles [first, end) that at least one query at first_position .. end_position - 1 attends to."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    return first, tl.cdiv(end_position, BLOCK_N)


@triton.jit
def block_ids(table, tile, seq_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile's block or, if blocks are smaller than tiles, the block of each row.

    Rows past the request's end get its last block: undefined entries of the table are never used.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + tl.minimum(tile * BLOCK_N, seq_len - 1) // BLOCK_SIZE)
    else:
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + tl.minimum(positions, seq_len - 1) // BLOCK_SIZE)


@triton.jit
def tile_pointers(
    cache, ids, tile, kv_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers [BLOCK_N, PADDED] to the keys or values of a tile, for one head."""
    row = tl.arange(0, BLOCK_N)
    element = tl.arange(0, PADDED)
    if BLOCK_SIZE % BLOCK_N == 0:
        first = (ids.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + (tile * BLOCK_N) % BLOCK_SIZE
        return cache + first * HEAD_SIZE + row[:, None] * HEAD_SIZE + element[None, :]
    else:
        slot = (ids.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + (tile * BLOCK_N + row) % BLOCK_SIZE
        return cache + (slot * HEAD_SIZE)[:, None] + element[None, :]


@triton.jit
def load_rows(pointers, present, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Zeros where the padding of a head begins and, if MASKED, in rows that are not `present`."""
    element = tl.arange(0, PADDED)
    if MASKED and HEAD_SIZE != PADDED:
        return tl.load(pointers, mask=present[:, None] & (element < HEAD_SIZE)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=present[:, None], other=0.0)
    elif HEAD_SIZE != PADDED:
        return tl.load(pointers, mask=(element < HEAD_SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)
