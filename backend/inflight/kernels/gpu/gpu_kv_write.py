"""Writes to the paged KV pool, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["to_fp8", "write_kernel"]

_FP8_MAX = tl.constexpr(448.0)  # of e4m3; larger numbers become NaN


@triton.jit
def to_fp8(x, scale):
    """x / scale, within the range of e4m3."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / scale, -_FP8_MAX), _FP8_MAX)


@triton.jit
def _write_rows(
    rows,
    cache,
    cache_row,
    mapped,
    scales,
    kv_head,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Store the rows [BLOCK_T] that are `mapped`, divided by their head's scale if HAS_SCALES."""
    element = tl.arange(0, PADDED)
    mask = mapped[:, None] & (element < SIZE)[None, :]
    x = tl.load(rows[:, None] + element[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        x = to_fp8(x, tl.load(scales + kv_head))
    tl.store(cache + (cache_row * SIZE)[:, None] + element[None, :], x.to(cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping"])
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    slot_mapping,
    num_tokens,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Store the keys and values of BLOCK_T tokens, for one head, in their slots.  Grid (token blocks, NUM_KV_HEADS).

    key [T, Hkv, KEY_SIZE] and value [T, Hkv, VALUE_SIZE] have contiguous elements; a slot of -1 is skipped.
    """
    kv_head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    mapped = slot >= 0
    token, kv_head_wide = token.to(tl.int64), kv_head.to(tl.int64)
    cache_row = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    _write_rows(
        key + token * key_stride_token + kv_head_wide * key_stride_head, key_cache, cache_row, mapped,
        key_scale, kv_head, KEY_SIZE, KEY_PADDED, HAS_SCALES,
    )  # fmt: skip
    _write_rows(
        value + token * value_stride_token + kv_head_wide * value_stride_head, value_cache, cache_row, mapped,
        value_scale, kv_head, VALUE_SIZE, VALUE_PADDED, HAS_SCALES,
    )  # fmt: skip
