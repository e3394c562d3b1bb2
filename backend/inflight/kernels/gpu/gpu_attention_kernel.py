"""Paged, ragged attention in the Triton language: one kernel for decodes, prefill chunks and mixes.

A program computes one *query block* of one KV head: some tokens of one request times the query heads that
share the KV head (GQA), as rows, so that keys and values are read once for all of them.  It goes through
the keys in tiles of BLOCK_N, with an online softmax in base 2.

    rows of a query block, 3 heads per KV head     keys of the request, tile by tile
    token 7 head 0 |                               [ seen ] [ seen ] [ s--- ] [      ]
    token 7 head 1 |                               [ seen ] [ seen ] [ s--- ] [      ]
    token 7 head 2 |                               [ seen ] [ seen ] [ s--- ] [      ]
    token 8 head 0 |                               [ seen ] [ seen ] [ se-- ] [      ]
    ...                                             no mask  no mask  masked   skipped

A tile spans several blocks of the pool or part of one.  Tiles outside the window of all rows are skipped.

If query blocks are few and contexts long, several programs share a block's keys: each stores an unnormalised
sum, its maximum and its weight, and `reduce_kernel` joins them, as in Flash-Decoding.  Which program has what is
in the step's plan (`gpu_attention_plan.py`).  How keys are split depends on the whole batch and decides the order of
additions, so the last bits of a result depend on the batch, as those of cuBLAS do.

The online softmax is that of FlashAttention (Dao et al., arXiv:2205.14135).

The pool's layout is [num_blocks, num_kv_heads, block_size, head_size]: what a program reads of a block is
contiguous.
"""

# A condition on constants must be the only one of its `if`, so that one side only is compiled.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from inflight.kernels.gpu.gpu_attention_plan import HEADER, read_item
from inflight.kernels.gpu.gpu_attention_tiles import block_ids, load_rows, locate, tile_pointers, visible_tiles
from inflight.kernels.gpu.gpu_pdl import begin

__all__ = ["attend_kernel", "reduce_kernel"]

_LOG2_E = tl.constexpr(1.4426950408889634)

# These change from step to step; specialising on their divisibility would compile while requests wait.
_VARYING = ["block_table_stride", "scratch_rows", "room"]
_VARYING_POINTERS = ["query_start_loc", "seq_lens", "block_table", "plan"]


@triton.jit
def _add_values(
    sums, p, decay, value_cache, ids, tile, kv_head, seq_len,
    NUM_KV_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """sums * decay + p @ the tile's values, which are in the blocks `ids`."""
    present = tile * BLOCK_N + tl.arange(0, BLOCK_N) < seq_len
    values = tile_pointers(value_cache, ids, tile, kv_head, NUM_KV_HEADS, BLOCK_SIZE, VALUE_SIZE, VALUE_PADDED, BLOCK_N)
    # Rows past the request's end may be NaN, which a weight of zero does not cancel.
    v = load_rows(values, present, VALUE_SIZE, VALUE_PADDED, MASKED).to(DOT)
    return tl.dot(p, v, sums * decay[:, None], input_precision="ieee")


@triton.jit
def _accumulate(
    sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale, softcap,
    first_tile, end_tile,
    NUM_KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles first_tile .. end_tile - 1; scores are in base 2.

    sums [rows, VALUE_PADDED], row_max [rows] and weights [rows], all float32, are updated and returned.

    LATE: a tile's values are multiplied one tile later, so that wgmma computes that product beside the next tile's
    softmax, as in FlashAttention-3 (Shah et al., arXiv:2407.08608).
    """
    # Block ids are read one tile ahead, so that no load of keys waits for them.
    ids = block_ids(table, first_tile, seq_len, BLOCK_SIZE, BLOCK_N)
    if LATE:
        # An operand that is itself carried from tile to tile would be put in shared memory; as integers it is not.
        BITS: tl.constexpr = tl.int16 if DOT.primitive_bitwidth == 16 else tl.int32
        late_p = tl.zeros([q.shape[0], BLOCK_N], BITS)
        late_decay = tl.full([q.shape[0]], 1.0, tl.float32)
        late_ids = ids
    for tile in tl.range(first_tile, end_tile):
        next_ids = block_ids(table, tile + 1, seq_len, BLOCK_SIZE, BLOCK_N)
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = tile_pointers(key_cache, ids, tile, kv_head, NUM_KV_HEADS, BLOCK_SIZE, KEY_SIZE, KEY_PADDED, BLOCK_N)
        k = load_rows(keys, position < seq_len, KEY_SIZE, KEY_PADDED, False).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATE:  # at the first tile: zeros times its own values
            sums = _add_values(
                sums, late_p.to(DOT, bitcast=True), late_decay, value_cache, late_ids, tl.maximum(tile - 1, first_tile),
                kv_head, seq_len, NUM_KV_HEADS, VALUE_SIZE, VALUE_PADDED, BLOCK_SIZE, BLOCK_N, MASKED, DOT,
            )  # fmt: skip
        unit = scale
        if HAS_SOFTCAP:
            # softcap * tanh(x); tanh(x) = 1 - 2 / (1 + e^2x) has the right limits if e^2x overflows.
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E * scale / softcap)))
            unit = softcap * _LOG2_E
        if MASKED:
            seen = position[None, :] <= row_position[:, None]
            if WINDOW > 0:
                seen = seen & (row_position[:, None] - position[None, :] < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        # Scores are multiplied by `unit`, which is positive, together with the shift: one operation.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
        # A row that has seen no key yet has no maximum to subtract.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(scores * unit - shift[:, None])
        decay = tl.exp2(row_max - shift)
        weights = weights * decay + tl.sum(p, 1)
        if LATE:
            late_p, late_decay, late_ids = p.to(DOT).to(BITS, bitcast=True), decay, ids
        else:
            sums = _add_values(
                sums, p.to(DOT), decay, value_cache, ids, tile, kv_head, seq_len, NUM_KV_HEADS, VALUE_SIZE,
                VALUE_PADDED, BLOCK_SIZE, BLOCK_N, MASKED, DOT,
            )  # fmt: skip
        row_max = new_max
        ids = next_ids
    if LATE:
        if end_tile > first_tile:
            sums = _add_values(
                sums, late_p.to(DOT, bitcast=True), late_decay, value_cache, late_ids, end_tile - 1, kv_head, seq_len,
                NUM_KV_HEADS, VALUE_SIZE, VALUE_PADDED, BLOCK_SIZE, BLOCK_N, MASKED, DOT,
            )  # fmt: skip
    return sums, row_max, weights


@triton.jit
def _attend_tiles(
    sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale, softcap,
    first_tile, end_tile, first_position, end_position,
    NUM_KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ONE_LOOP: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`_accumulate` over all tiles; a tile that every row sees completely needs no mask, unless ONE_LOOP."""
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
            BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True, False, DOT,
        )  # fmt: skip
    if not ONE_LOOP:
        sums, row_max, weights = _accumulate(
            sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale,
            softcap, whole_first, whole_end, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED,
            BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, False, LATE, DOT,
        )  # fmt: skip
        sums, row_max, weights = _accumulate(
            sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale,
            softcap, whole_end, end_tile, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED,
            BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True, False, DOT,
        )  # fmt: skip
    return sums, row_max, weights


@triton.jit
def _store_block(
    out, partial_sums, partial_stats, sums, row_max, weights, item, kv_head, first_row_token, row, valid, parts,
    scratch_rows,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Store a query block's result or, if it is split, this part's."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    element = tl.arange(0, VALUE_PADDED)
    if parts == 1:
        result = sums / weights[:, None]
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        out_row = ((first_row_token + token).to(tl.int64) * NUM_HEADS + head) * VALUE_SIZE
        places = out + out_row[:, None] + element[None, :]
        out_mask = valid[:, None] & (element < VALUE_SIZE)[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=out_mask)
    else:
        partial = (item * NUM_KV_HEADS + kv_head).to(tl.int64) * scratch_rows + row
        tl.store(partial_sums + (partial * VALUE_PADDED)[:, None] + element[None, :], sums, mask=valid[:, None])
        tl.store(partial_stats + partial * 2, row_max, mask=valid)
        tl.store(partial_stats + partial * 2 + 1, weights, mask=valid)


@triton.jit
def _attend_block(
    out, partial_sums, partial_stats, query, key_cache, value_cache, key_scale, value_scale, sinks, table, item, part,
    parts, kv_head, first_row_token, first_position, num_tokens, seq_len, query_stride_token, query_stride_head, scale,
    softcap, scratch_rows,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, ONE_LOOP: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One query block over part `part` of its keys, of `parts` equal ones.

    The block's tokens are rows first_row_token .. + num_tokens of `query`, at positions from first_position on.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = token < num_tokens
    end_position = first_position + num_tokens
    first_tile, end_tile = visible_tiles(first_position, end_position, WINDOW, BLOCK_N)
    num_tiles = end_tile - first_tile
    end_tile = first_tile + num_tiles * (part + 1) // parts
    first_tile += num_tiles * part // parts

    element = tl.arange(0, KEY_PADDED)
    q_row = (first_row_token + token).to(tl.int64) * query_stride_token + head * query_stride_head
    q_mask = valid[:, None] & (element < KEY_SIZE)[None, :]
    q = tl.load(query + q_row[:, None] + element[None, :], mask=q_mask, other=0.0).to(DOT)
    row_position = tl.minimum(first_position + token, end_position - 1)
    if HAS_SCALES:
        scale = scale * tl.load(key_scale + kv_head)
    if not HAS_SOFTCAP:
        scale = scale * _LOG2_E  # softmax in base 2

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        if part == 0:
            row_max = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2_E
            weights = tl.full([ROWS], 1.0, tl.float32)
    sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    sums, row_max, weights = _attend_tiles(
        sums, row_max, weights, q, key_cache, value_cache, table, kv_head, row_position, seq_len, scale, softcap,
        first_tile, end_tile, first_position, end_position, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_PADDED,
        VALUE_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, ONE_LOOP, LATE, DOT,
    )  # fmt: skip
    if HAS_SCALES:
        sums = sums * tl.load(value_scale + kv_head)
    _store_block(
        out, partial_sums, partial_stats, sums, row_max, weights, item, kv_head, first_row_token, row, valid, parts,
        scratch_rows, NUM_HEADS, NUM_KV_HEADS, VALUE_SIZE, VALUE_PADDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def attend_kernel(
    out, partial_sums, partial_stats, query, key_cache, value_cache, key_scale, value_scale, sinks,
    query_start_loc, seq_lens, block_table, plan, block_table_stride, query_stride_token, query_stride_head, scale,
    softcap, scratch_rows,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, SHORT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_LOOP: tl.constexpr, LATE: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (NUM_KV_HEADS * items that the plan has room for,), the heads of an item side by side; programs past the
    plan's items return at once.

    query [T, Hq, KEY_SIZE] with contiguous elements, out [T, Hq, VALUE_SIZE] contiguous; key_cache and
    value_cache [blocks, Hkv, BLOCK_SIZE, size]; key_scale, value_scale float32 [Hkv] (HAS_SCALES);
    sinks [Hq] (HAS_SINKS); WINDOW 0 is none.  partial_sums [parts, Hkv, scratch_rows, VALUE_PADDED] and
    partial_stats [.., 2] are float32 scratch.

    Requests of few tokens take SHORT_ROWS rows, others blocks of BLOCK_M rows; with BLOCK_M 0 all are short.
    ONE_LOOP: all tiles are masked, for less code.  LATE: see `_accumulate`; for blocks of BLOCK_M rows.
    """
    begin(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    SHORT_TOKENS: tl.constexpr = SHORT_ROWS // GROUP
    BLOCK_Q: tl.constexpr = SHORT_TOKENS if BLOCK_M == 0 else BLOCK_M // GROUP
    kv_head, item = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    num_items = tl.load(plan)
    request, block, part, parts = read_item(plan, item)
    if item < num_items:
        query_len, seq_len, first_row_token, first_position, num_tokens = locate(
            query_start_loc, seq_lens, request, block, BLOCK_Q
        )
        table = block_table + request.to(tl.int64) * block_table_stride
        if query_len <= SHORT_TOKENS:
            _attend_block(
                out, partial_sums, partial_stats, query, key_cache, value_cache, key_scale, value_scale, sinks,
                table, item, part, parts, kv_head, first_row_token, first_position, num_tokens, seq_len,
                query_stride_token, query_stride_head, scale, softcap, scratch_rows, NUM_HEADS, NUM_KV_HEADS,
                KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, HAS_SINKS,
                HAS_SCALES, SHORT_ROWS, BLOCK_N, True, False, DOT,
            )  # fmt: skip
        if BLOCK_M > 0:
            if query_len > SHORT_TOKENS:
                _attend_block(
                    out, partial_sums, partial_stats, query, key_cache, value_cache, key_scale, value_scale, sinks,
                    table, item, part, parts, kv_head, first_row_token, first_position, num_tokens, seq_len,
                    query_stride_token, query_stride_head, scale, softcap, scratch_rows, NUM_HEADS, NUM_KV_HEADS,
                    KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, HAS_SINKS,
                    HAS_SCALES, BLOCK_M, BLOCK_N, ONE_LOOP, LATE, DOT,
                )  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def reduce_kernel(
    out, partial_sums, partial_stats, query_start_loc, seq_lens, plan, room, scratch_rows,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    SHORT_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Join the parts of split query blocks, CHUNK at a time.  Grid (any, NUM_KV_HEADS, any): rows and joins in turn."""
    begin(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = (SHORT_ROWS if BLOCK_M == 0 else BLOCK_M) // GROUP
    kv_head = tl.program_id(1)
    for join in range(tl.program_id(2), tl.load(plan + 1), tl.num_programs(2)):
        first_item = tl.load(plan + HEADER + room * 4 + join)
        request, block, _, parts = read_item(plan, first_item)
        _, _, first_row_token, _, num_tokens = locate(query_start_loc, seq_lens, request, block, BLOCK_Q)
        element = tl.arange(0, VALUE_PADDED)
        for row in range(tl.program_id(0), num_tokens * GROUP, tl.num_programs(0)):
            row_max, weights = float("-inf"), 0.0
            sums = tl.zeros([VALUE_PADDED], tl.float32)
            for first in range(0, parts, CHUNK):
                part = first + tl.arange(0, CHUNK)
                there = part < parts
                partial = ((first_item + part) * NUM_KV_HEADS + kv_head).to(tl.int64) * scratch_rows + row
                part_max = tl.load(partial_stats + partial * 2, mask=there, other=float("-inf"))
                part_weights = tl.load(partial_stats + partial * 2 + 1, mask=there, other=0.0)
                part_sums = tl.load(
                    partial_sums + (partial * VALUE_PADDED)[:, None] + element[None, :], mask=there[:, None], other=0.0
                )
                new_max = tl.maximum(row_max, tl.max(part_max, 0))
                # A row may have seen no key in any part so far.
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
                decay, share = tl.exp2(row_max - shift), tl.exp2(part_max - shift)
                weights = weights * decay + tl.sum(part_weights * share, 0)
                sums = sums * decay + tl.sum(part_sums * share[:, None], 0)
                row_max = new_max
            out_row = (first_row_token + row // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP
            places = out + out_row * VALUE_SIZE + element
            tl.store(places, (sums / weights).to(out.dtype.element_ty), mask=element < VALUE_SIZE)
