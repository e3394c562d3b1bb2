"""A linear layer whose weight stays in e4m3 with a scale per block, for inputs of 16 bits.

A program multiplies a tile of rows by some outputs.  It reads the weight as bytes, which become numbers of the inputs'
dtype in registers, exactly; the sums of BLOCK_K inputs, which share a scale, are scaled and added in float32.  Nothing
of the inputs is rounded, and cards without fp8 tensor cores run it, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gpu.launch import interpreted
from inflight.ops.block_fp8 import BLOCK_INPUTS

__all__ = ["GpuBlockFp8"]

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class _Tile(NamedTuple):
    """Rows and outputs of a program; its warps and stages."""

    rows: int
    outputs: int
    warps: int
    stages: int


_FEW_OUTPUTS = 8192  # up to so many, narrow tiles keep more of a card's SMs busy
_DECODE, _NARROW, _WIDE = _Tile(16, 64, 4, 4), _Tile(16, 32, 4, 6), _Tile(64, 64, 4, 4)


@triton.jit
def _e4m3_tile(words, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Numbers [BLOCK_N, BLOCK_K] of int32 words [BLOCK_N, BLOCK_K / 4] of four, whose order becomes 0 2 1 3.

    The seven bits without the sign become the lowest of the exponent and the highest of the mantissa, which is the
    number, subnormal ones included, times a power of 2.
    """
    SHIFT: tl.constexpr = DTYPE.fp_mantissa_width - 3
    FACTOR: tl.constexpr = 2.0 ** (DTYPE.exponent_bias - 7)
    codes = words[:, :, None] >> (tl.arange(0, 2) * 8)[None, None, :]
    codes = ((codes & 0x007F007F) << SHIFT) | ((codes & 0x00800080) << 8)
    low = (codes & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (codes >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return tl.join(low, high).reshape(BLOCK_N, BLOCK_K) * tl.full((1, 1), FACTOR, tl.float32).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def block_fp8_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of rows of x [num_rows, K] times BLOCK_N outputs of weight [N, K / 4] in words; out [num_rows, N].

    scale [cdiv(N, SCALE_ROWS), cdiv(K, SCALE_COLUMNS)]; BLOCK_K divides SCALE_COLUMNS.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < N
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weights = weight_ptr + outputs.to(tl.int64)[:, None] * (K // 4)
    scales = scale_ptr + outputs // SCALE_ROWS * ((K + SCALE_COLUMNS - 1) // SCALE_COLUMNS)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_tile + inputs[None, :], mask=is_row[:, None] & (inputs < K)[None, :], other=0.0)
        words = start // 4 + tl.arange(0, BLOCK_K // 4)
        codes = tl.load(weights + words[None, :], mask=is_output[:, None] & (words < K // 4)[None, :], other=0)
        w = _e4m3_tile(codes, x.dtype, BLOCK_N, BLOCK_K)
        x = tl.permute(x.reshape(BLOCK_M, BLOCK_K // 4, 2, 2), (0, 1, 3, 2)).reshape(BLOCK_M, BLOCK_K)
        scale = tl.load(scales + start // SCALE_COLUMNS, mask=is_output, other=0.0)
        sums += tl.dot(w.to(DOT), tl.trans(x.to(DOT)), input_precision="ieee") * scale[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    places = out_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None]
    tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


class GpuBlockFp8:
    """`BlockFp8Ops` on a GPU; with the Triton language's interpreter, on any tensors.

    One launch, of one kernel for up to 16 rows and of another for more.  NaN among the weights would count as 480.
    """

    name = "gpu"

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None) -> Tensor:
        """See `BlockFp8Ops.linear`."""
        return _launch(x, weight, scale, block, bias, _tile_of(len(x), len(weight)))

    def prepare(self, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None, like: Tensor) -> None:
        """See `BlockFp8Ops.prepare`."""
        x = like.new_zeros(1, weight.shape[1])
        for rows in (1, _WIDE.rows):
            _launch(x, weight, scale, block, bias, _tile_of(rows, len(weight)))


def _tile_of(num_rows: int, num_outputs: int) -> _Tile:
    if num_rows > _DECODE.rows:
        return _WIDE
    return _NARROW if num_outputs <= _FEW_OUTPUTS else _DECODE


def _launch(
    x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None, tile: _Tile
) -> Tensor:
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    assert x.stride(1) == 1
    dot = tl.float32 if x.dtype == torch.bfloat16 and interpreted() else _DTYPES[x.dtype]  # see `gpu_experts._operands`
    block_fp8_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))](
        x, weight.view(torch.int32), scale, bias, out, num_rows, x.stride(0),
        N=num_outputs, K=num_inputs, SCALE_ROWS=block[0], SCALE_COLUMNS=block[1],
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=BLOCK_INPUTS, DOT=dot,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
