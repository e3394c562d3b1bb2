"""From a layer's merged projection to its attention in one launch: norms of heads, rotary embedding, KV write.

Bitwise equal to the separate kernels (`gpu_ops.py`, `gpu_kv_write.py`): it rounds where they store, and its tiles have
their shape, so that sums over a head have their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.attention.base import AttentionMetadata, LayerSpec
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache
from inflight.kernels.gpu.gpu_kv_write import to_fp8
from inflight.kernels.gpu.gpu_pdl import begin
from inflight.ops.base import Angles, HeadNorms

__all__ = ["rotate_and_write", "rotate_and_write_kernel"]

_TILE = 2048  # elements per program, as for norms


@triton.jit
def _rotated(
    heads_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    angle_row,
    heads,
    count,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """float32 [HEADS, PADDED]: heads < count of one token, normalised and rotated; zero outside.

    The first 2 * HALF elements turn in pairs (i, i + HALF); `partner` is the other one of each element's pair.
    """
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    columns = tl.arange(0, PADDED)
    inside = (heads < count)[:, None] & (columns < SIZE)[None, :]
    rows = heads_ptr + heads[:, None] * SIZE
    x = tl.load(rows + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
        weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        x = (x * scale[:, None] * weight[None, :]).to(dtype).to(tl.float32)
    if HALF:
        turns, is_first = columns < 2 * HALF, columns < HALF
        partners = tl.where(is_first, columns + HALF, columns - HALF)
        partner = tl.load(rows + partners[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            weight = tl.load(weight_ptr + partners, mask=turns, other=0.0).to(tl.float32)
            partner = (partner * scale[:, None] * weight[None, :]).to(dtype).to(tl.float32)
        angles = angle_row + (tl.where(is_first, columns, partners) if SHARED else columns)
        cos = tl.load(cos_ptr + angles, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=turns, other=0.0).to(tl.float32)
        signed = tl.where(is_first[None, :], -partner, partner)
        x = tl.where(turns[None, :], x * cos[None, :] + signed * sin[None, :], x)
    return x


@triton.jit
def _store(
    cache, scales, cache_rows, x, heads, count, SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_SCALES: tl.constexpr
):
    """Store the heads < count of `x` [HEADS, PADDED] in rows of the cache, divided by their scales if HAS_SCALES."""
    columns = tl.arange(0, PADDED)
    if HAS_SCALES:
        x = to_fp8(x, tl.load(scales + heads, mask=heads < count, other=1.0)[:, None])
    mask = (heads < count)[:, None] & (columns < SIZE)[None, :]
    tl.store(cache + (cache_rows * SIZE)[:, None] + columns[None, :], x.to(cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotate_and_write_kernel(
    qkv,
    query_out,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    query_weight,
    key_weight,
    cos,
    sin,
    positions,
    slot_mapping,
    qkv_stride,
    angle_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """HEADS heads of one token; along axis 1, programs take the query's heads, the key's, then the value's."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    row = qkv + token * qkv_stride
    dtype: tl.constexpr = qkv.dtype.element_ty
    angle_row = token * angle_stride
    if HAS_POSITIONS:
        angle_row = tl.load(positions + token) * angle_stride
    if tile < query_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        x = _rotated(
            row, query_weight, cos, sin, angle_row, heads, NUM_HEADS, eps,
            KEY_SIZE, KEY_PADDED, HALF, SHARED, HAS_NORMS,
        )  # fmt: skip
        query_rows = token * NUM_HEADS + heads
        _store(query_out, None, query_rows, x, heads, NUM_HEADS, KEY_SIZE, KEY_PADDED, False)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            heads = (tile - query_tiles) % kv_tiles * HEADS + tl.arange(0, HEADS)
            cache_rows = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
            keys = row + NUM_HEADS * KEY_SIZE
            if tile < query_tiles + kv_tiles:
                x = _rotated(
                    keys, key_weight, cos, sin, angle_row, heads, NUM_KV_HEADS, eps,
                    KEY_SIZE, KEY_PADDED, HALF, SHARED, HAS_NORMS,
                ).to(dtype)  # fmt: skip
                _store(key_cache, key_scale, cache_rows, x, heads, NUM_KV_HEADS, KEY_SIZE, KEY_PADDED, HAS_SCALES)
            else:
                columns = tl.arange(0, VALUE_PADDED)
                inside = (heads < NUM_KV_HEADS)[:, None] & (columns < VALUE_SIZE)[None, :]
                values = keys + NUM_KV_HEADS * KEY_SIZE + heads[:, None] * VALUE_SIZE + columns[None, :]
                x = tl.load(values, mask=inside, other=0.0)
                _store(
                    value_cache, value_scale, cache_rows, x, heads, NUM_KV_HEADS, VALUE_SIZE, VALUE_PADDED, HAS_SCALES
                )


def rotate_and_write(
    qkv: Tensor,
    spec: LayerSpec,
    cache: GpuKVCache,
    metadata: AttentionMetadata,
    norms: HeadNorms | None,
    angles: Angles | None,
    launch: Mapping[str, Any] | None = None,
) -> Tensor:
    """See `FusedOps.rotate_and_write`; query is a new contiguous tensor, `qkv` is unchanged.

    Args:
        launch: further keywords of the launch (`gpu_pdl.py`).

    Raises:
        ValueError: an odd number of rotated elements, or more than a head has.
    """
    num_tokens, width = qkv.shape
    cos, sin = (None, None) if angles is None else (angles.cos.contiguous(), angles.sin.contiguous())
    if angles is not None and (angles.size % 2 or angles.size > spec.key_head_size):
        raise ValueError(f"{angles.size} elements are rotated; an even number up to {spec.key_head_size} is supported")
    key_padded, value_padded = (triton.next_power_of_2(size) for size in (spec.key_head_size, spec.value_head_size))
    heads = max(1, _TILE // max(key_padded, value_padded))
    query = torch.empty((num_tokens, spec.num_heads, spec.key_head_size), dtype=qkv.dtype, device=qkv.device)
    tiles = triton.cdiv(spec.num_heads, heads) + 2 * triton.cdiv(spec.num_kv_heads, heads)
    if num_tokens:
        rotate_and_write_kernel[(num_tokens, tiles)](
            qkv,
            query,
            cache.key,
            cache.value,
            cache.key_scale,
            cache.value_scale,
            None if norms is None else norms.query_weight,
            None if norms is None else norms.key_weight,
            cos,
            sin,
            None if angles is None else angles.positions,
            metadata.slot_mapping,
            qkv.stride(0) if num_tokens > 1 else width,
            0 if cos is None else cos.shape[1],
            0.0 if norms is None else norms.eps,
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            KEY_SIZE=spec.key_head_size,
            VALUE_SIZE=spec.value_head_size,
            KEY_PADDED=key_padded,
            VALUE_PADDED=value_padded,
            BLOCK_SIZE=metadata.block_size,
            HALF=0 if angles is None else angles.size // 2,
            SHARED=angles is not None and angles.shared,
            HAS_NORMS=norms is not None,
            HAS_POSITIONS=angles is not None and angles.positions is not None,
            HAS_SCALES=cache.key_scale is not None,
            HEADS=heads,
            num_warps=4,
            enable_fp_fusion=False,
            **(launch or {}),
        )
    return query
