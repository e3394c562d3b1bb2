"""How programs of the attention kernel share a step's work: one program that fills the plan, on the device.

A *work item* is a query block and a part of its keys.  A launch has room for W items per KV head, a number that
follows from the batch's size and the card (`gpu_attention_configs.room_for`), never from lengths: it serves every
batch of its size, also from a CUDA graph.  Which item does what is decided here, once per step and kind of layer:

    keys of each request     3 tiles   2 tiles   40 tiles   none
    parts, of 10 tiles       1         1         4          0
    items                    [ 2.0  2.1  2.2  2.3 | 1  0 | -  - ]      request.part; W is 8

Of the tiles per part that fit the room, the plan takes those with which the last program is estimated to end first.
Parts come before whole query blocks, because they take longest; item i stores its partial sums in row i of the
scratch.  Programs of the places left return at once.

The plan is int32 [HEADER + 4 W + extra]:

    0                    number of items
    1                    number of joins: query blocks whose keys are split
    HEADER + 4 i ..      item i: request, query block of the request, part, number of parts
    HEADER + 4 W + j     join j: its first item; its other parts follow
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.kernels.gpu.gpu_pdl import begin

__all__ = ["HEADER", "NUM_OPTIONS", "plan_kernel", "read_item"]

HEADER = tl.constexpr(4)
NUM_OPTIONS = 32

_MIN_SPLIT_TILES = tl.constexpr(2)
# Costs besides processing tiles, in tiles: starting a program, and the second pass.
_START_COST = tl.constexpr(2.0)
_REDUCE_COST = tl.constexpr(3.0)


@triton.jit
def read_item(plan, item):
    """Returns (request, query block of the request, part, number of parts)."""
    record = plan + HEADER + item * 4
    return tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)


@triton.jit
def _work_of(query_start_loc, seq_lens, request, num_requests, block_q, block_n, window):
    """Query blocks of each request, and the tiles that one of them attends to on average."""
    present = request < num_requests
    start = tl.load(query_start_loc + request, mask=present, other=0)
    query_len = tl.load(query_start_loc + request + 1, mask=present, other=0) - start
    keys = tl.load(seq_lens + request, mask=present, other=0) - query_len // 2
    tiles = tl.cdiv(tl.minimum(keys, window), block_n)
    return tl.cdiv(query_len, block_q), tl.where(query_len > 0, tl.maximum(tiles, 1), 0)


@triton.jit
def _choose(
    query_start_loc, seq_lens, num_requests, extra, running, num_kv_heads, block_q, block_n, window,
    CHUNK: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The tiles per part for which the last program is estimated to end first.  Returns (tiles per part, items)."""
    longest, num_blocks, num_tiles = 0, 0, 0.0
    for first in range(0, num_requests, CHUNK):
        request = first + tl.arange(0, CHUNK)
        blocks, tiles = _work_of(query_start_loc, seq_lens, request, num_requests, block_q, block_n, window)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        num_blocks += tl.sum(blocks, 0)
        num_tiles += tl.sum(blocks.to(tl.float32) * tiles, 0)

    option = tl.arange(0, OPTIONS)
    parts_of_longest = ((4 + option % 4) << (option // 4)) >> 2  # 1, .., 2, 2, 3, 3, 4, 5, 6, 7, 8, 10, 12, ..
    split_tiles = tl.maximum(tl.cdiv(longest, parts_of_longest), _MIN_SPLIT_TILES)
    items = tl.zeros([OPTIONS], tl.int32)
    for first in range(0, num_requests, CHUNK):
        request = first + tl.arange(0, CHUNK)
        blocks, tiles = _work_of(query_start_loc, seq_lens, request, num_requests, block_q, block_n, window)
        items += tl.sum(blocks[:, None] * tl.cdiv(tiles[:, None], split_tiles[None, :]), 0)

    programs = tl.maximum(items * num_kv_heads, 1)
    each = num_tiles * num_kv_heads / programs + _START_COST
    longest_part = tl.cdiv(longest, tl.maximum(tl.cdiv(longest, split_tiles), 1))
    cost = tl.maximum(tl.cdiv(programs, running) * each, longest_part + _START_COST)
    cost += tl.where(split_tiles < longest, _REDUCE_COST, 0.0)
    # The first option splits nothing, so one always fits.
    cost = tl.where(items - num_blocks <= extra, cost, float("inf"))
    chosen = option == tl.argmin(cost, 0)
    return tl.sum(tl.where(chosen, split_tiles, 0), 0), tl.sum(tl.where(chosen, items, 0), 0)


_VARYING = ["num_requests", "room", "extra", "running", "num_kv_heads", "block_q", "block_n", "window"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["query_start_loc", "seq_lens"])
def plan_kernel(
    query_start_loc, seq_lens, plan, num_requests, room, extra, running, num_kv_heads, block_q, block_n, window,
    CHUNK: tl.constexpr, OPTIONS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (1,).

    query_start_loc int32 [R + 1] and seq_lens int32 [R] are read, CHUNK requests at a time; plan is written.
    room: W.  extra: items beyond one per query block that fit W.  running: programs that the card runs concurrently.
    block_q: tokens per query block.  block_n: keys per tile.  window: tokens that a token attends to, at most.

    Whole query blocks are in reverse order: later ones of a prompt attend to more keys.
    """
    begin(PDL)
    split_tiles, num_items = _choose(
        query_start_loc, seq_lens, num_requests, extra, running, num_kv_heads, block_q, block_n, window, CHUNK, OPTIONS
    )
    items, joins = plan + HEADER, plan + HEADER + room * 4
    next_part, next_whole, next_join = 0, num_items - 1, 0
    for first in range(0, num_requests, CHUNK):
        request = first + tl.arange(0, CHUNK)
        blocks, tiles = _work_of(query_start_loc, seq_lens, request, num_requests, block_q, block_n, window)
        parts = tl.maximum(tl.cdiv(tiles, split_tiles), 1)
        split_blocks = tl.where(parts > 1, blocks, 0)
        whole_blocks = blocks - split_blocks
        first_part = next_part + tl.cumsum(split_blocks * parts, 0) - split_blocks * parts
        first_whole = next_whole - tl.cumsum(whole_blocks, 0) + whole_blocks
        first_join = next_join + tl.cumsum(split_blocks, 0) - split_blocks
        first_item, step = tl.where(parts > 1, first_part, first_whole), tl.where(parts > 1, 1, -1)
        count = blocks * parts
        for index in range(tl.max(count, 0)):
            record = items + (first_item + index * step) * 4
            tl.store(record, request, mask=index < count)
            tl.store(record + 1, index // parts, mask=index < count)
            tl.store(record + 2, index % parts, mask=index < count)
            tl.store(record + 3, parts, mask=index < count)
        for index in range(tl.max(split_blocks, 0)):
            tl.store(joins + first_join + index, first_part + index * parts, mask=index < split_blocks)
        next_part += tl.sum(split_blocks * parts, 0)
        next_whole -= tl.sum(whole_blocks, 0)
        next_join += tl.sum(split_blocks, 0)
    tl.store(plan, num_items)
    tl.store(plan + 1, next_join)
