"""Device functions of `gpu_attention_kernel.py`: where a query block is, and reading tiles of the pool."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_ids", "load_rows", "locate", "tile_pointers", "visible_tiles"]


@triton.jit
def locate(query_start_loc, seq_lens, request, block, BLOCK_Q: tl.constexpr):
    """Query block `block` of `request`.

    Returns (the request's tokens in this step, its tokens in total, the batch row of the block's first token, that
    token's position, number of tokens in the block).
    """
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    offset = block * BLOCK_Q
    num_tokens = tl.minimum(query_len - offset, BLOCK_Q)
    return query_len, seq_len, start + offset, seq_len - query_len + offset, num_tokens


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
