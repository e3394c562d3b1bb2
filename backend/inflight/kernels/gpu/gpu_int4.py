"""A linear layer whose weight stays in four bits, for inputs of 16 bits: W4A16.

Codes become numbers of the inputs' dtype in registers, exactly: the bits of a code, put into the mantissa of a power of
2, are that power plus the code, and a subtraction leaves the code less its zero point.  The sums of the inputs of a
group are scaled in float32.  Nothing of the inputs is rounded.

Up to MAX_ROWS rows, a product reads each code once.  Its inputs are split among programs as the layer's size alone
says; each stores its sums in float32, and a second kernel adds them up in order:

    tile 0    part 0   part 1   part 2      sums [PARTS, MAX_ROWS, N]  ->  out [M, N]
    tile 1    part 0   part 1   part 2

There are no atomics, and tiles of 16, 32 and 64 rows multiply in the same order: a row's bits are the same in any batch
of up to MAX_ROWS.  Larger products compute more than they read: the weight is dequantised into a scratch that all
layers share, for a product of cuBLAS.

Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models, arXiv:2408.11743
Hoque et al., Accelerating a Triton Fused Kernel for W4A16 Quantized Inference with SplitK, arXiv:2402.00025
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gpu.launch import interpreted
from inflight.ops.int4 import ZERO, Int4Weight

__all__ = ["MAX_ROWS", "GpuInt4", "Parts", "parts_of"]

MAX_ROWS = 64
_BLOCK_N = 64  # outputs of a program, which are the rows of a product on tensor cores
# Rows of a tile -> warps and stages.  Fixed: what a search finds would differ between runs, and with it the bits.
_TILES = {16: (4, 5), 32: (4, 4), 64: (4, 3)}
_PROGRAMS = 528  # four for each SM of an H100, whatever the card, so that bits are the same on all
_MIN_BLOCKS = 4  # of a part: fewer do not fill the pipeline
_SUMMED = 256  # outputs of a program that adds up parts
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Parts:
    """How the inputs of a layer are shared: the number of parts, and the blocks of each."""

    count: int
    blocks: int


def parts_of(weight: Int4Weight) -> Parts:
    """Of a layer's size alone."""
    total = len(weight.codes)
    wanted = _PROGRAMS // triton.cdiv(weight.num_outputs, _BLOCK_N)
    blocks = triton.cdiv(total, max(1, min(wanted, total // _MIN_BLOCKS)))
    return Parts(triton.cdiv(total, blocks), blocks)


@triton.jit
def _numbers(words, offset, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr):
    """Of the low nibbles of int32 words [BLOCK_N, SPAN / 4], less `offset` [BLOCK_N]: [BLOCK_N, SPAN]."""
    # 128 in bfloat16, 1024 in float16: there the last bit of the mantissa is 1.
    POWER: tl.constexpr = (DTYPE.exponent_bias + DTYPE.fp_mantissa_width) << DTYPE.fp_mantissa_width
    codes = words[:, :, None] >> (tl.arange(0, 2) * 8)[None, None, :]
    codes = (codes & 0x000F000F) | (POWER << 16 | POWER)
    low = (codes & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (codes >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    power: tl.constexpr = 2.0**DTYPE.fp_mantissa_width
    return tl.join(low, high).reshape(BLOCK_N, SPAN) - (offset + power).to(DTYPE)[:, None]


@triton.jit
def _group(scales_ptr, offsets_ptr, outputs, is_output, place, d, d_min, ZERO: tl.constexpr, MINS: tl.constexpr):
    """Scale, zero point and min [BLOCK_N] of the group whose numbers begin at `place`; the min is 0 without MINS."""
    scale = tl.load(scales_ptr + place + outputs, mask=is_output, other=0.0).to(tl.float32)
    zero = tl.zeros_like(scale)
    least = tl.zeros_like(scale)
    if MINS:
        scale *= d
        least = tl.load(offsets_ptr + place + outputs, mask=is_output, other=0).to(tl.float32) * d_min
    elif offsets_ptr is not None:
        zero = tl.load(offsets_ptr + place + outputs, mask=is_output, other=0).to(tl.float32)
    else:
        zero += ZERO
    return scale, zero, least


@triton.jit
def _add_half(numbers, x, products, sums, least, DOT: tl.constexpr, MINS: tl.constexpr):
    """The products of numbers [BLOCK_N, SPAN] and x [SPAN, BLOCK_M], added to `products`; `sums` less the mins times x.

    The sums of x are a product with ones, too: so they are in every row of the tile at once, and their order of
    additions does not depend on BLOCK_M.
    """
    numbers = numbers.to(DOT)
    if MINS:
        ones = tl.full(numbers.shape, 1.0, tl.float32).to(DOT)
        sums -= tl.dot(ones, x, input_precision="ieee") * least[:, None]
    return tl.dot(numbers, x, products, input_precision="ieee"), sums


@triton.jit(do_not_specialize=["num_rows", "blocks_per_part"])
def int4_kernel(
    x_ptr, words_ptr, scales_ptr, offsets_ptr, factors_ptr, bias_ptr, out_ptr, sums_ptr,
    num_rows, num_outputs, num_blocks, blocks_per_part, x_stride, block_stride, group_stride, factor_stride,
    SPAN: tl.constexpr, SPANS_PER_GROUP: tl.constexpr, MINS: tl.constexpr, SPLIT: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAX_ROWS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs for all rows, of one part of the inputs; grid (tiles of outputs, parts).

    SPLIT: sums go to sums [parts, MAX_ROWS, num_outputs]; else results to out [num_rows, num_outputs].
    """
    rows = tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    spans = tl.arange(0, SPAN)
    x_tile = x_ptr + rows[None, :] * x_stride + spans[:, None]
    words_tile = words_ptr + outputs[:, None] * (SPAN // 4) + tl.arange(0, SPAN // 4)[None, :]
    d = tl.zeros((BLOCK_N,), tl.float32)
    d_min = tl.zeros((BLOCK_N,), tl.float32)
    if MINS:
        d = tl.load(factors_ptr + outputs, mask=is_output, other=0.0)
        d_min = tl.load(factors_ptr + factor_stride + outputs, mask=is_output, other=0.0)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(1) * blocks_per_part
    for block in range(first, tl.minimum(first + blocks_per_part, num_blocks)):
        words = tl.load(words_tile + block * block_stride, mask=is_output[:, None], other=0)
        x_low = tl.load(x_tile + block * (2 * SPAN), mask=is_row[None, :], other=0.0).to(DOT)
        x_high = tl.load(x_tile + block * (2 * SPAN) + SPAN, mask=is_row[None, :], other=0.0).to(DOT)
        place = 2 * block // SPANS_PER_GROUP * group_stride
        scale, zero, least = _group(scales_ptr, offsets_ptr, outputs, is_output, place, d, d_min, ZERO, MINS)
        low = _numbers(words, zero, DTYPE, BLOCK_N, SPAN)
        products = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        products, sums = _add_half(low, x_low, products, sums, least, DOT, MINS)
        if SPANS_PER_GROUP % 2 != 0:  # the halves can belong to two groups
            sums += products * scale[:, None]
            place = (2 * block + 1) // SPANS_PER_GROUP * group_stride
            scale, zero, least = _group(scales_ptr, offsets_ptr, outputs, is_output, place, d, d_min, ZERO, MINS)
            products = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        high = _numbers(words >> 4, zero, DTYPE, BLOCK_N, SPAN)
        products, sums = _add_half(high, x_high, products, sums, least, DOT, MINS)
        sums += products * scale[:, None]

    inside = is_output[:, None] & is_row[None, :]
    places = rows[None, :] * num_outputs + outputs[:, None]
    if SPLIT:
        tl.store(sums_ptr + tl.program_id(1) * MAX_ROWS * num_outputs + places, sums, mask=inside)
    else:
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def int4_sum_kernel(
    sums_ptr, bias_ptr, out_ptr, num_outputs, parts, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [M, num_outputs]: the sums of all parts, in order, plus the bias; grid (tiles of outputs, M)."""
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_outputs
    places = tl.program_id(1) * num_outputs + outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        total += tl.load(sums_ptr + part * MAX_ROWS * num_outputs + places, mask=is_output, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def int4_dequantise_kernel(
    words_ptr, scales_ptr, offsets_ptr, factors_ptr, out_ptr, num_outputs, num_inputs,
    block_stride, group_stride, factor_stride,
    SPAN: tl.constexpr, SPANS_PER_GROUP: tl.constexpr, MINS: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_N outputs of out [num_outputs, num_inputs]; grid (blocks, tiles of outputs)."""
    block, outputs = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    words_tile = words_ptr + outputs[:, None] * (SPAN // 4) + tl.arange(0, SPAN // 4)[None, :]
    words = tl.load(words_tile + block * block_stride, mask=is_output[:, None], other=0)
    d = tl.zeros((BLOCK_N,), tl.float32)
    d_min = tl.zeros((BLOCK_N,), tl.float32)
    if MINS:
        d = tl.load(factors_ptr + outputs, mask=is_output, other=0.0)
        d_min = tl.load(factors_ptr + factor_stride + outputs, mask=is_output, other=0.0)
    for half in tl.static_range(2):
        place = (2 * block + half) // SPANS_PER_GROUP * group_stride
        scale, zero, least = _group(scales_ptr, offsets_ptr, outputs, is_output, place, d, d_min, ZERO, MINS)
        numbers = _numbers(words >> (4 * half), zero, tl.float16, BLOCK_N, SPAN).to(tl.float32)
        numbers = numbers * scale[:, None] - least[:, None]
        inputs = block * (2 * SPAN) + half * SPAN + tl.arange(0, SPAN)
        places = outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
        tl.store(out_ptr + places, numbers.to(out_ptr.dtype.element_ty), mask=is_output[:, None])


class GpuInt4:
    """`Int4Ops` on a GPU; with the Triton language's interpreter, on any tensors.  The layers of a model share one."""

    name = "gpu"
    max_rows = MAX_ROWS

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._plain: Tensor | None = None

    def prepare(self, weight: Int4Weight, dtype: torch.dtype) -> None:
        """See `Int4Ops.prepare`.  Steps run one after another, so one scratch is enough."""
        count, device = parts_of(weight).count, weight.codes.device
        needed = count * MAX_ROWS * weight.num_outputs if count > 1 else 0
        self._sums = _grown(self._sums, needed, torch.float32, device)
        self._plain = _grown(self._plain, weight.num_outputs * weight.num_inputs, dtype, device)

    def linear(self, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
        """See `Int4Ops.linear`."""
        if len(x) > MAX_ROWS:
            return F.linear(x, self.dequantised(weight, x.dtype), bias)
        out = x.new_empty(len(x), weight.num_outputs)
        if len(x):
            self._multiply(x, weight, bias, out)
        return out

    def dequantised(self, weight: Int4Weight, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in the scratch, which the next call overwrites."""
        assert self._plain is not None and self._plain.dtype == dtype, "prepared for inputs of another dtype"
        out = self._plain[: weight.num_outputs * weight.num_inputs].view(weight.num_outputs, weight.num_inputs)
        grid = len(weight.codes), triton.cdiv(weight.num_outputs, _BLOCK_N)
        words, *others = _tensors(weight)
        int4_dequantise_kernel[grid](
            words, *others, out, weight.num_outputs, weight.num_inputs, *_strides(weight),
            SPAN=weight.span, SPANS_PER_GROUP=weight.spans_per_group,
            MINS=weight.factors is not None, ZERO=ZERO, BLOCK_N=_BLOCK_N, num_warps=4,
        )  # fmt: skip
        return out

    def _multiply(self, x: Tensor, weight: Int4Weight, bias: Tensor | None, out: Tensor) -> None:
        num_rows, parts = len(x), parts_of(weight)
        x = x if x.stride(1) == 1 else x.contiguous()
        tile = next(rows for rows in _TILES if num_rows <= rows)
        warps, stages = _TILES[tile]
        # The interpreter multiplies the bits of bfloat16.
        dot = tl.float32 if x.dtype == torch.bfloat16 and interpreted() else _DTYPES[x.dtype]
        assert self._sums is not None
        int4_kernel[(triton.cdiv(weight.num_outputs, _BLOCK_N), parts.count)](
            x, *_tensors(weight), bias, out, self._sums,
            num_rows, weight.num_outputs, len(weight.codes), parts.blocks, x.stride(0), *_strides(weight),
            SPAN=weight.span, SPANS_PER_GROUP=weight.spans_per_group, MINS=weight.factors is not None,
            SPLIT=parts.count > 1, ZERO=ZERO,
            BLOCK_M=tile, BLOCK_N=_BLOCK_N, MAX_ROWS=MAX_ROWS, DTYPE=_DTYPES[x.dtype], DOT=dot,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if parts.count > 1:
            int4_sum_kernel[(triton.cdiv(weight.num_outputs, _SUMMED), num_rows)](
                self._sums, bias, out, weight.num_outputs, parts.count, MAX_ROWS=MAX_ROWS, BLOCK=_SUMMED, num_warps=4
            )


def _grown(scratch: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if scratch is not None and scratch.numel() >= numel and scratch.dtype == dtype and scratch.device == device:
        return scratch
    return torch.empty(max(1, numel), dtype=dtype, device=device)


def _tensors(weight: Int4Weight) -> tuple[Tensor | None, ...]:
    """Codes in words of four bytes, scales, offsets, factors."""
    return weight.codes.view(torch.int32), weight.scales, weight.offsets, weight.factors


def _strides(weight: Int4Weight) -> tuple[Any, ...]:
    """Of blocks in words, of groups and of factors."""
    factors = weight.factors
    assert weight.offsets is None or weight.offsets.stride() == weight.scales.stride()
    return weight.codes.stride(0) // 4, weight.scales.stride(0), 0 if factors is None else factors.stride(0)
