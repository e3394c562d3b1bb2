"""The small operations' kernels in the Triton language; `gpu_ops.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.kernels.gpu.gpu_pdl import begin
from inflight.ops.base import E4M3_MAX, MIN_SCALE

__all__ = [
    "add_rms_norm_kernel",
    "quantize_rows_kernel",
    "rms_norm_kernel",
    "rotary_kernel",
    "silu_and_mul_kernel",
    "silu_and_mul_quantized_kernel",
]

_E4M3_MAX, _MIN_SCALE = tl.constexpr(E4M3_MAX), tl.constexpr(MIN_SCALE)


@triton.jit
def _store_rows(out_ptr, scales_ptr, x, rows, columns, inside, num_rows, WIDTH: tl.constexpr, QUANTIZED: tl.constexpr):
    """Store rows [ROWS, BLOCK], which are zero outside; if QUANTIZED in e4m3, after division by their scales.

    A quotient rounds to E4M3_MAX or less, so nothing saturates.
    """
    places = out_ptr + rows[:, None] * WIDTH + columns[None, :]
    if QUANTIZED:
        wide = x.to(tl.float32)
        scales = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 1), _E4M3_MAX), _MIN_SCALE)
        tl.store(scales_ptr + rows, scales, mask=rows < num_rows)
        tl.store(places, tl.div_rn(wide, scales[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(places, x, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    weight_ptr,
    num_rows,
    x_token_stride,
    x_head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A tile of ROWS rows of WIDTH <= BLOCK elements; row r is head r % HEADS of token r // HEADS."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    starts = rows // HEADS * x_token_stride + rows % HEADS * x_head_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = (x * scale[:, None] * weight[None, :]).to(x_ptr.dtype.element_ty)
    _store_rows(out_ptr, scales_ptr, out, rows, columns, inside, num_rows, WIDTH, QUANTIZED)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    scales_ptr,
    weight_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    factor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """residual += factor * x, rounded; returns the norm of the rounded sum, as two separate steps would."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    places = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
    residual = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    rounded = (residual + x * factor).to(residual_ptr.dtype.element_ty)
    tl.store(places, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 1) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = (total * scale[:, None] * weight[None, :]).to(residual_ptr.dtype.element_ty)
    _store_rows(out_ptr, scales_ptr, out, rows, columns, inside, num_rows, WIDTH, QUANTIZED)


@triton.jit
def _rotate(heads_ptr, head_stride, heads, count, first_cos, first_sin, second_cos, second_sin, places, HALF):
    """Rotate `count` heads of one token: element i < HALF pairs with element i + HALF."""
    inside = (heads < count)[:, None] & (places < HALF)[None, :]
    pointers = heads_ptr + heads[:, None] * head_stride + places[None, :]
    first = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, first * first_cos[None, :] + -second * first_sin[None, :], mask=inside)
    tl.store(pointers + HALF, second * second_cos[None, :] + first * second_sin[None, :], mask=inside)


@triton.jit
def rotary_kernel(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_stride,
    sin_stride,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """HEADS heads of one token; along axis 1, programs take the query's heads, then the key's."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    places = tl.arange(0, BLOCK)
    inside = places < HALF
    cos, sin = cos_ptr + token * cos_stride + places, sin_ptr + token * sin_stride + places
    first_cos = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + HALF, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + HALF, mask=inside, other=0.0).to(tl.float32)
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    if tile < query_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        start = query_ptr + token * query_token_stride
        _rotate(
            start, query_head_stride, heads, QUERY_HEADS, first_cos, first_sin, second_cos, second_sin, places, HALF
        )
    else:
        heads = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)
        start = key_ptr + token * key_token_stride
        _rotate(start, key_head_stride, heads, KEY_HEADS, first_cos, first_sin, second_cos, second_sin, places, HALF)


@triton.jit
def _silu_and_mul(start, inside, WIDTH: tl.constexpr):
    """float32: silu(gate) * up, for the elements at `start`."""
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """BLOCK elements of one row of the result."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    out = _silu_and_mul(x_ptr + row * x_stride + columns, inside, WIDTH)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_quantized_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A tile of ROWS rows of the result, WIDTH <= BLOCK elements each."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    out = _silu_and_mul(x_ptr + rows[:, None] * x_stride + columns[None, :], inside, WIDTH)
    _store_rows(values_ptr, scales_ptr, out.to(x_ptr.dtype.element_ty), rows, columns, inside, num_rows, WIDTH, True)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A tile of ROWS rows of WIDTH <= BLOCK elements."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
    _store_rows(values_ptr, scales_ptr, x, rows, columns, inside, num_rows, WIDTH, True)
