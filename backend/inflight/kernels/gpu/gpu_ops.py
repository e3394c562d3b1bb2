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
from torch import Tensor

from inflight.attention.base import AttentionMetadata, LayerAttention
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache
from inflight.kernels.gpu.gpu_ops_kernels import (
    add_rms_norm_kernel,
    quantize_rows_kernel,
    rms_norm_kernel,
    rotary_kernel,
    silu_and_mul_kernel,
    silu_and_mul_quantized_kernel,
)
from inflight.kernels.gpu.gpu_pdl import pdl_options
from inflight.kernels.gpu.gpu_rotate_and_write import rotate_and_write
from inflight.ops.base import Angles, HeadNorms, QuantizedRows, Rows
from inflight.ops.reference_ops import rotate_and_write_in_parts

__all__ = ["GpuOps"]

# Elements per program; wider rows take one program each.
_TILE = 2048
_MAX_WIDTH = 2**16


class GpuOps:
    """`FusedOps` on a GPU; with the Triton language's interpreter, on any tensors.

    Args:
        launch_pdl: launch kernels before the one before them has ended (`gpu_pdl.py`).

    Raises:
        ValueError: rows wider than 65536, or rows that are not contiguous.

    Quantized results require compute capability 8.9.
    """

    name = "gpu"

    def __init__(self, launch_pdl: bool = False) -> None:
        self._launch = pdl_options(launch_pdl)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, quantized: bool = False) -> Rows:
        """See `FusedOps.rms_norm`; new contiguous tensors, plain rows in the dtype of `x`."""
        if quantized:
            rows = _new_rows(len(x), x.shape[1], x.device)
            _rms_norm(rows.values, rows.scales, x, weight, eps, self._launch)
            return rows
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rms_norm(out, None, x, weight, eps, self._launch)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0, quantized: bool = False
    ) -> Rows:
        """See `FusedOps.add_rms_norm`; plain rows are in the dtype of `residual`."""
        if quantized:
            rows = _new_rows(len(x), x.shape[1], x.device)
            _add_rms_norm(rows.values, rows.scales, x, residual, weight, eps, factor, self._launch)
            return rows
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        _add_rms_norm(out, None, x, residual, weight, eps, factor, self._launch)
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
                **self._launch,
            )

    def rotate_and_write(
        self, qkv: Tensor, layer: LayerAttention, batch: Any, norms: HeadNorms | None, angles: Angles | None
    ) -> Tensor:
        """See `FusedOps.rotate_and_write`; one launch where the cache is a GPU's, or else several."""
        metadata = batch if isinstance(batch, AttentionMetadata) else getattr(batch, "metadata", None)
        cache = layer.cache
        if not isinstance(cache, GpuKVCache) or not isinstance(metadata, AttentionMetadata):
            return rotate_and_write_in_parts(self, qkv, layer, batch, norms, angles)
        return rotate_and_write(qkv, layer.spec, cache, metadata, norms, angles, self._launch)

    def silu_and_mul(self, gate_up: Tensor, quantized: bool = False) -> Rows:
        """See `FusedOps.silu_and_mul`; new contiguous tensors, plain rows in the dtype of `gate_up`."""
        if quantized:
            return _silu_and_mul_quantized(gate_up, self._launch)
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
                **self._launch,
            )
        return out

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        """See `FusedOps.quantize_rows`."""
        num_rows, width = x.shape
        out = _new_rows(num_rows, width, x.device)
        rows, block, warps = _row_tiles(width)
        if num_rows:
            quantize_rows_kernel[(triton.cdiv(num_rows, rows),)](
                x,
                out.values,
                out.scales,
                num_rows,
                _stride(x, 0),
                WIDTH=width,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
                **self._launch,
            )
        return out


def _rms_norm(
    out: Tensor, scales: Tensor | None, x: Tensor, weight: Tensor, eps: float, launch: dict[str, Any]
) -> None:
    """Launch the norm; into e4m3 if there are scales."""
    heads = x.shape[1] if x.dim() == 3 else 1
    width, num_rows = x.shape[-1], x.shape[0] * heads
    rows, block, warps = _row_tiles(width)
    if num_rows:
        rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x,
            out,
            scales,
            weight,
            num_rows,
            _stride(x, 0),
            _stride(x, 1) if x.dim() == 3 else 0,
            eps,
            HEADS=heads,
            WIDTH=width,
            ROWS=rows,
            BLOCK=block,
            QUANTIZED=scales is not None,
            num_warps=warps,
            enable_fp_fusion=False,
            **launch,
        )


def _add_rms_norm(
    out: Tensor,
    scales: Tensor | None,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    factor: float,
    launch: dict[str, Any],
) -> None:
    """Launch the sum and its norm; into e4m3 if there are scales."""
    num_rows, width = x.shape
    rows, block, warps = _row_tiles(width)
    if num_rows:
        add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x,
            residual,
            out,
            scales,
            weight,
            num_rows,
            _stride(x, 0),
            _stride(residual, 0),
            eps,
            factor,
            WIDTH=width,
            ROWS=rows,
            BLOCK=block,
            QUANTIZED=scales is not None,
            num_warps=warps,
            enable_fp_fusion=False,
            **launch,
        )


def _silu_and_mul_quantized(gate_up: Tensor, launch: dict[str, Any]) -> QuantizedRows:
    """Whole rows by each program, as a row has one scale."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _new_rows(num_rows, width, gate_up.device)
    rows, block, warps = _row_tiles(width)
    if num_rows:
        silu_and_mul_quantized_kernel[(triton.cdiv(num_rows, rows),)](
            gate_up,
            out.values,
            out.scales,
            num_rows,
            _stride(gate_up, 0),
            WIDTH=width,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
            **launch,
        )
    return out


def _new_rows(num_rows: int, width: int, device: torch.device) -> QuantizedRows:
    values = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device)
    return QuantizedRows(values, torch.empty(num_rows, dtype=torch.float32, device=device))


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
