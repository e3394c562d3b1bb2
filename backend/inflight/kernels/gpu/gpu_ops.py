"""`FusedOps` in the Triton language, each in one pass over its operands.

Block sizes are computed from the shapes, so nothing is tuned while requests wait.  For a model's shapes a kernel
has a single compiled variant, regardless of the batch: the number of tokens appears only in the grid.  The first
forward pass, at load, compiles them.

Multiplications and additions are not contracted (`enable_fp_fusion=False`): elementwise operations are
bitwise equal to those of `ReferenceOps`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.attention.base import AttentionMetadata, LayerAttention
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache
from inflight.kernels.gpu.gpu_rotate_and_write import rotate_and_write
from inflight.ops.base import E4M3_MAX, MIN_SCALE, Angles, HeadNorms, QuantizedRows
from inflight.ops.reference import rotate_and_write_in_parts

__all__ = ["GpuOps"]

# Elements per program; wider rows take one program each.
_TILE = 2048
_MAX_WIDTH = 2**16
_E4M3_MAX, _MIN_SCALE = tl.constexpr(E4M3_MAX), tl.constexpr(MIN_SCALE)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    out_ptr,
    weight_ptr,
    num_rows,
    x_token_stride,
    x_head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of ROWS rows of WIDTH <= BLOCK elements; row r is head r % HEADS of token r // HEADS."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    starts = rows // HEADS * x_token_stride + rows % HEADS * x_head_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + rows[:, None] * WIDTH + columns[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    weight_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    factor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual += factor * x, rounded; returns the norm of the rounded sum, as two separate steps would."""
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
    out = total * scale[:, None] * weight[None, :]
    tl.store(out_ptr + rows[:, None] * WIDTH + columns[None, :], out, mask=inside)


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
):
    """HEADS heads of one token; along axis 1, programs take the query's heads, then the key's."""
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
def silu_and_mul_kernel(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of one row of the result."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = x_ptr + row * x_stride + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def _store_quantized(values_ptr, scales_ptr, x, rows, columns, inside, num_rows, WIDTH: tl.constexpr):
    """Store float32 rows [ROWS, BLOCK], which are zero outside; a quotient rounds to E4M3_MAX or less."""
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), _E4M3_MAX), _MIN_SCALE)
    tl.store(scales_ptr + rows, scales, mask=rows < num_rows)
    values = tl.div_rn(x, scales[:, None]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + rows[:, None] * WIDTH + columns[None, :], values, mask=inside)


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
):
    """A tile of ROWS rows of WIDTH <= BLOCK elements."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    _store_quantized(values_ptr, scales_ptr, x, rows, columns, inside, num_rows, WIDTH)


class GpuOps:
    """`FusedOps` on a GPU; with the Triton language's interpreter, on any tensors.

    Raises:
        ValueError: rows wider than 65536, or rows that are not contiguous.
    """

    name = "gpu"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `FusedOps.rms_norm`; a new contiguous tensor in the dtype of `x`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        heads = x.shape[1] if x.dim() == 3 else 1
        width, num_rows = x.shape[-1], x.shape[0] * heads
        rows, block, warps = _row_tiles(width)
        if num_rows:
            rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
                x,
                out,
                weight,
                num_rows,
                _stride(x, 0),
                _stride(x, 1) if x.dim() == 3 else 0,
                eps,
                HEADS=heads,
                WIDTH=width,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """See `FusedOps.add_rms_norm`; the norm is in the dtype of `residual`."""
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        num_rows, width = x.shape
        rows, block, warps = _row_tiles(width)
        if num_rows:
            add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
                x,
                residual,
                out,
                weight,
                num_rows,
                _stride(x, 0),
                _stride(residual, 0),
                eps,
                factor,
                WIDTH=width,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        return out

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See `FusedOps.rotary`."""
        half = cos.shape[-1] // 2
        block = triton.next_power_of_2(half)
        query_heads, key_heads = query.shape[1], key.shape[1]
        heads = min(max(1, _TILE // 2 // block), triton.next_power_of_2(max(query_heads, key_heads)))
        grid = len(query), triton.cdiv(query_heads, heads) + triton.cdiv(key_heads, heads)
        if len(query):
            rotary_kernel[grid](
                query,
                key,
                cos,
                sin,
                _stride(query, 0),
                _stride(query, 1),
                _stride(key, 0),
                _stride(key, 1),
                _stride(cos, 0),
                _stride(sin, 0),
                QUERY_HEADS=query_heads,
                KEY_HEADS=key_heads,
                HALF=half,
                HEADS=heads,
                BLOCK=block,
                num_warps=4,
                enable_fp_fusion=False,
            )

    def rotate_and_write(
        self, qkv: Tensor, layer: LayerAttention, batch: Any, norms: HeadNorms | None, angles: Angles | None
    ) -> Tensor:
        """See `FusedOps.rotate_and_write`; one launch where the cache is a GPU's, or else several."""
        metadata = batch if isinstance(batch, AttentionMetadata) else getattr(batch, "metadata", None)
        cache = layer.cache
        if not isinstance(cache, GpuKVCache) or not isinstance(metadata, AttentionMetadata):
            return rotate_and_write_in_parts(self, qkv, layer, batch, norms, angles)
        return rotate_and_write(qkv, layer.spec, cache, metadata, norms, angles)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `FusedOps.silu_and_mul`; a new contiguous tensor in the dtype of `gate_up`."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
        block = min(_TILE, triton.next_power_of_2(width))
        if num_rows:
            silu_and_mul_kernel[(num_rows, triton.cdiv(width, block))](
                gate_up,
                out,
                _stride(gate_up, 0),
                WIDTH=width,
                BLOCK=block,
                num_warps=4,
                enable_fp_fusion=False,
            )
        return out

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        """See `FusedOps.quantize_rows`; requires compute capability 8.9."""
        num_rows, width = x.shape
        values = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        rows, block, warps = _row_tiles(width)
        if num_rows:
            quantize_rows_kernel[(triton.cdiv(num_rows, rows),)](
                x,
                values,
                scales,
                num_rows,
                _stride(x, 0),
                WIDTH=width,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        return QuantizedRows(values, scales)


def _row_tiles(width: int) -> tuple[int, int, int]:
    """(rows per tile, padded width, warps) of a kernel whose programs hold whole rows."""
    if width > _MAX_WIDTH:
        raise ValueError(f"rows have {width} elements; the maximum is {_MAX_WIDTH}; use ReferenceOps")
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    return rows, block, min(16, max(4, rows * block // 512))


def _stride(x: Tensor, dim: int) -> int:
    """The stride of a dimension, in elements; for a dimension of size 1, its stride in a contiguous tensor.

    The compiler specialises kernels on strides: an arbitrary one would trigger a compilation.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"strides are {x.stride()}; rows must be contiguous; call .contiguous()")
    if x.shape[dim] > 1:
        return x.stride(dim)
    size = 1
    for extent in x.shape[dim + 1 :]:
        size *= extent
    return size
