"""Paged, ragged attention in the Triton language: one kernel for decode, prefill chunks and mixes.

A program computes one *query block* of one KV head: some tokens of one request times the query heads
that share the KV head (GQA), which stand side by side as rows, so that keys and values are read once
for all of them.  It walks over the keys in tiles of BLOCK_N, with an online softmax in base 2.

    rows of a query block, 3 heads per KV head     keys of the request, tile by tile
    token 7 head 0 |                               [ seen ] [ seen ] [ s--- ] [      ]
    token 7 head 1 |                               [ seen ] [ seen ] [ s--- ] [      ]
    token 7 head 2 |                               [ seen ] [ seen ] [ s--- ] [      ]
    token 8 head 0 |                               [ seen ] [ seen ] [ se-- ] [      ]
    ...                                             no mask  no mask  masked   skipped

A tile spans several blocks or a part of one; only what a window lets someone see is walked over.

Request r owns the query blocks from query_start_loc[r] // BLOCK_Q + r on: computed without the host,
at most T // BLOCK_Q + R in all, and a binary search finds the request of a block.  Programs of blocks
that do not exist return at once, so a captured launch serves any batch of its size or less.

Where blocks are few and contexts long, the keys are split over programs (`num_splits`, the third grid
axis): each leaves an unnormalised sum, its maximum and its weight, and `reduce_kernel` joins them, as
in Flash-Decoding.  The online softmax is that of FlashAttention (Dao et al., arXiv:2205.14135).

Keys and values lie as [num_blocks, num_kv_heads, block_size, head_size], so that what a program reads
of a block is contiguous.
"""

# A condition on constants stands alone, so that Triton compiles one side only.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from inflight.kernels.gpu.gpu_attention_configs import MAX_SPLITS

__all__ = ["attend_kernel", "reduce_kernel"]

_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_LOG2_E = tl.constexpr(1.4426950408889634)

# These change from step to step; a kernel compiled anew for each divisor would stall requests.
_VARYING = [
    "num_requests",
    "block_table_stride",
    "split_tiles",
    "num_splits",
    "slot_rows",
    "split_short_only",
]
_VARYING_POINTERS = ["query_start_loc", "seq_lens", "block_table"]


@triton.jit
def _request_of_block(query_start_loc, block, num_requests, BLOCK_Q: tl.constexpr):
    """The last request whose first query block is not past `block`."""
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _locate(query_start_loc, seq_lens, block, num_requests, BLOCK_Q: tl.constexpr, ONE_BLOCK_EACH: tl.constexpr):
    """What query block `block` is: (request, its tokens in the step, its tokens in all, the block's first
    row of the batch, that token's position, tokens of the block: none where there is no such block)."""
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
def _splits_in_use(tiles, split_tiles, num_splits):
    """Splits that have tiles; the last one takes all that are left."""
    return tl.minimum(tl.maximum(tl.cdiv(tiles, split_tiles), 1), num_splits)


@triton.jit
def _visible_tiles(first_position, end_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles [first, end) that some query at first_position .. end_position - 1 sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    return first, tl.cdiv(end_position, BLOCK_N)


@triton.jit
def _block_ids(table, tile, seq_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile's block, or where blocks are smaller than tiles each row's.

    Rows past the request's end get its last block: void entries of the table are never followed.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + tl.minimum(tile * BLOCK_N, seq_len - 1) // BLOCK_SIZE)
    else:
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + tl.minimum(positions, seq_len - 1) // BLOCK_SIZE)


@triton.jit
def _tile_pointers(
    cache,
    ids,
    tile,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pointers [BLOCK_N, PADDED] to a tile's keys or values of one head."""
    row = tl.arange(0, BLOCK_N)
    element = tl.arange(0, PADDED)
    if BLOCK_SIZE % BLOCK_N == 0:
        first = (ids.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + (tile * BLOCK_N) % BLOCK_SIZE
        return cache + first * HEAD_SIZE + row[:, None] * HEAD_SIZE + element[None, :]
    else:
        slot = (ids.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + (tile * BLOCK_N + row) % BLOCK_SIZE
        return cache + (slot * HEAD_SIZE)[:, None] + element[None, :]


@triton.jit
def _load_rows(pointers, present, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Zeros where the head ends before the padded width and, if MASKED, in rows that are not `present`."""
    element = tl.arange(0, PADDED)
    if MASKED and HEAD_SIZE != PADDED:
        return tl.load(pointers, mask=present[:, None] & (element < HEAD_SIZE)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=present[:, None], other=0.0)
    elif HEAD_SIZE != PADDED:
        return tl.load(pointers, mask=(element < HEAD_SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _accumulate(
    sums,
    row_max,
    weights,
    q,
    key_cache,
    value_cache,
    table,
    kv_head,
    row_position,
    seq_len,
    scale,
    softcap,
    first_tile,
    end_tile,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Online softmax over the tiles first_tile .. end_tile - 1; scores are in base 2.

    sums [rows, VALUE_PADDED], row_max [rows], weights [rows], all float32, come in and go out.
    """
    # The next tile's block ids are read a tile ahead, so that no load of keys waits for them.
    ids = _block_ids(table, first_tile, seq_len, BLOCK_SIZE, BLOCK_N)
    for tile in tl.range(first_tile, end_tile):
        next_ids = _block_ids(table, tile + 1, seq_len, BLOCK_SIZE, BLOCK_N)
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        present = position < seq_len
        keys = _tile_pointers(key_cache, ids, tile, kv_head, NUM_KV_HEADS, BLOCK_SIZE, KEY_SIZE, KEY_PADDED, BLOCK_N)
        k = _load_rows(keys, present, KEY_SIZE, KEY_PADDED, False).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        unit = scale
        if HAS_SOFTCAP:
            # softcap * tanh(x); tanh(x) = 1 - 2 / (1 + e^2x) overflows to the right limits.
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E * scale / softcap)))
            unit = softcap * _LOG2_E
        if MASKED:
            seen = position[None, :] <= row_position[:, None]
            if WINDOW > 0:
                seen = seen & (row_position[:, None] - position[None, :] < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        # Scores have yet to be multiplied by `unit`, which is positive: with the shift that is one operation.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(scores * unit - shift[:, None])
        decay = tl.exp2(row_max - shift)
        weights = weights * decay + tl.sum(p, 1)
        values = _tile_pointers(
            value_cache, ids, tile, kv_head, NUM_KV_HEADS, BLOCK_SIZE, VALUE_SIZE, VALUE_PADDED, BLOCK_N
        )
        # What lies past the request's end may be NaN, which a weight of zero does not remove.
        v = _load_rows(values, present, VALUE_SIZE, VALUE_PADDED, MASKED).to(DOT)
        sums = tl.dot(p.to(DOT), v, sums * decay[:, None], input_precision="ieee")
        row_max = new_max
        ids = next_ids
    return sums, row_max, weights


@triton.jit
def _attend_block(
    out,
    partial_sums,
    partial_stats,
    query,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    sinks,
    table,
    slot,
    kv_head,
    first_row_token,
    first_position,
    num_tokens,
    seq_len,
    query_stride_token,
    query_stride_head,
    scale,
    softcap,
    split_tiles,
    num_splits,
    slot_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    DOT: tl.constexpr,
):
    """One query block over the keys of one split.

    The block's tokens are rows first_row_token .. + num_tokens of `query`, at positions from
    first_position on.  With more than one split, `slot` says where the partial result goes.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = token < num_tokens
    end_position = first_position + num_tokens
    first_tile, end_tile = _visible_tiles(first_position, end_position, WINDOW, BLOCK_N)
    used = _splits_in_use(end_tile - first_tile, split_tiles, num_splits)
    if split < used:
        first_tile += split * split_tiles
        if split < used - 1:
            end_tile = tl.minimum(first_tile + split_tiles, end_tile)

        element = tl.arange(0, KEY_PADDED)
        q_row = (first_row_token + token).to(tl.int64) * query_stride_token + head * query_stride_head
        q = tl.load(
            query + q_row[:, None] + element[None, :],
            mask=valid[:, None] & (element < KEY_SIZE)[None, :],
            other=0.0,
        ).to(DOT)
        row_position = tl.minimum(first_position + token, end_position - 1)
        if HAS_SCALES:
            scale = scale * tl.load(key_scale + kv_head)
        if not HAS_SOFTCAP:
            scale = scale * _LOG2_E  # softmax in base 2

        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        weights = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            if split == 0:
                row_max = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2_E
                weights = tl.full([ROWS], 1.0, tl.float32)
        sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)

        # Tiles between these two are seen whole by every row.
        whole_first, whole_end = end_tile, end_tile
        if not ONE_LOOP:
            whole_first = first_tile
            if WINDOW > 0:
                whole_first = tl.cdiv(tl.maximum(end_position - WINDOW, 0), BLOCK_N)
                whole_first = tl.minimum(tl.maximum(whole_first, first_tile), end_tile)
            whole_end = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N, whole_first), end_tile)
        if ONE_LOOP or WINDOW > 0:
            sums, row_max, weights = _accumulate(
                sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale,
                softcap, first_tile, whole_first, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED,
                BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True, DOT,
            )  # fmt: skip
        if not ONE_LOOP:
            sums, row_max, weights = _accumulate(
                sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale,
                softcap, whole_first, whole_end, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED,
                BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, False, DOT,
            )  # fmt: skip
            sums, row_max, weights = _accumulate(
                sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale,
                softcap, whole_end, end_tile, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED,
                BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True, DOT,
            )  # fmt: skip

        if HAS_SCALES:
            sums = sums * tl.load(value_scale + kv_head)
        element = tl.arange(0, VALUE_PADDED)
        if used == 1:
            result = sums / weights[:, None]
            out_row = ((first_row_token + token).to(tl.int64) * NUM_HEADS + head) * VALUE_SIZE
            tl.store(
                out + out_row[:, None] + element[None, :],
                result.to(out.dtype.element_ty),
                mask=valid[:, None] & (element < VALUE_SIZE)[None, :],
            )
        else:
            partial = ((slot * NUM_KV_HEADS + kv_head).to(tl.int64) * slot_rows + row) * num_splits + split
            tl.store(partial_sums + (partial * VALUE_PADDED)[:, None] + element[None, :], sums, mask=valid[:, None])
            tl.store(partial_stats + partial * 2, row_max, mask=valid)
            tl.store(partial_stats + partial * 2 + 1, weights, mask=valid)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def attend_kernel(
    out,
    partial_sums,
    partial_stats,
    query,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    sinks,
    query_start_loc,
    seq_lens,
    block_table,
    num_requests,
    block_table_stride,
    query_stride_token,
    query_stride_head,
    scale,
    softcap,
    split_tiles,
    num_splits,
    slot_rows,
    split_short_only,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (NUM_KV_HEADS, query blocks, num_splits).

    query [T, Hq, KEY_SIZE] with contiguous elements, out [T, Hq, VALUE_SIZE] contiguous; key_cache and
    value_cache [blocks, Hkv, BLOCK_SIZE, size]; key_scale, value_scale float32 [Hkv] (HAS_SCALES);
    sinks [Hq] (HAS_SINKS); WINDOW 0 is none.  partial_sums [slots, Hkv, slot_rows, num_splits,
    VALUE_PADDED] and partial_stats [.., 2] are float32 scratch, void where num_splits is 1.

    Requests of few tokens take SHORT_ROWS rows, the others blocks of BLOCK_M rows; with BLOCK_M 0 all
    are short and block b is request b.  Slots are query blocks or, with `split_short_only`, requests,
    of which then the long ones are not split.  ONE_LOOP: tiles that need no mask get it all the same,
    for less code.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    SHORT_TOKENS: tl.constexpr = SHORT_ROWS // GROUP
    BLOCK_Q: tl.constexpr = SHORT_TOKENS if BLOCK_M == 0 else BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # Later tokens see more keys: the longest programs start first, so that none runs on alone at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    request, query_len, seq_len, first_row_token, first_position, num_tokens = _locate(
        query_start_loc, seq_lens, block, num_requests, BLOCK_Q, BLOCK_M == 0
    )
    table = block_table + request.to(tl.int64) * block_table_stride
    slot = tl.where(split_short_only != 0, request, block)
    if num_tokens > 0:
        if query_len <= SHORT_TOKENS:
            _attend_block(
                out, partial_sums, partial_stats, query, key_cache, value_cache, key_scale, value_scale, sinks,
                table, slot, kv_head, first_row_token, first_position, num_tokens, seq_len, query_stride_token,
                query_stride_head, scale, softcap, split_tiles, num_splits, slot_rows, NUM_HEADS, NUM_KV_HEADS,
                KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, HAS_SINKS,
                HAS_SCALES, SHORT_ROWS, BLOCK_N, True, DOT,
            )  # fmt: skip
        if BLOCK_M > 0:
            if query_len > SHORT_TOKENS:
                splits = tl.where(split_short_only != 0, 1, num_splits)
                _attend_block(
                    out, partial_sums, partial_stats, query, key_cache, value_cache, key_scale, value_scale, sinks,
                    table, slot, kv_head, first_row_token, first_position, num_tokens, seq_len, query_stride_token,
                    query_stride_head, scale, softcap, split_tiles, splits, slot_rows, NUM_HEADS, NUM_KV_HEADS,
                    KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, HAS_SINKS,
                    HAS_SCALES, BLOCK_M, BLOCK_N, ONE_LOOP, DOT,
                )  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def reduce_kernel(
    out,
    partial_sums,
    partial_stats,
    query_start_loc,
    seq_lens,
    num_requests,
    split_tiles,
    num_splits,
    slot_rows,
    split_short_only,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Joins what `attend_kernel` left of split query blocks.  Grid (rows in use, NUM_KV_HEADS, slots)."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    SHORT_TOKENS: tl.constexpr = SHORT_ROWS // GROUP
    BLOCK_Q: tl.constexpr = SHORT_TOKENS if BLOCK_M == 0 else BLOCK_M // GROUP
    row, kv_head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = slot
    if BLOCK_M > 0:
        if split_short_only != 0:
            block = tl.load(query_start_loc + slot) // BLOCK_Q + slot
    _, query_len, _, first_row_token, first_position, num_tokens = _locate(
        query_start_loc, seq_lens, block, num_requests, BLOCK_Q, BLOCK_M == 0
    )
    first_tile, end_tile = _visible_tiles(first_position, first_position + num_tokens, WINDOW, BLOCK_N)
    used = _splits_in_use(end_tile - first_tile, split_tiles, num_splits)
    split_here = (split_short_only == 0) | (query_len <= SHORT_TOKENS)
    if (row < num_tokens * GROUP) & (used > 1) & split_here:
        split = tl.arange(0, _MAX_SPLITS)
        element = tl.arange(0, VALUE_PADDED)
        there = split < used
        partial = ((slot * NUM_KV_HEADS + kv_head).to(tl.int64) * slot_rows + row) * num_splits + split
        row_max = tl.load(partial_stats + partial * 2, mask=there, other=float("-inf"))
        weights = tl.load(partial_stats + partial * 2 + 1, mask=there, other=0.0)
        sums = tl.load(
            partial_sums + (partial * VALUE_PADDED)[:, None] + element[None, :], mask=there[:, None], other=0.0
        )
        share = tl.exp2(row_max - tl.max(row_max, 0))
        result = tl.sum(sums * share[:, None], 0) / tl.sum(weights * share, 0)
        out_row = (first_row_token + row // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP
        tl.store(out + out_row * VALUE_SIZE + element, result.to(out.dtype.element_ty), mask=element < VALUE_SIZE)
