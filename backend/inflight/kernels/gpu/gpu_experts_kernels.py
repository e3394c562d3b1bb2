"""A mixture's experts in the Triton language; `gpu_experts.py` launches them.

A *pair* is a token and one of the K experts that it chose: pair p is choice p % K of token p // K.  Pairs are sorted by
expert, and each expert's are cut into tiles of BLOCK_M rows, so that a program reads one expert's weights:

    pairs by expert   0 0 0 0 0 | 2 2 | 3 3 3 3 3 3 3 3
    tiles of 4        0 0 0 0   0   2 2   3 3 3 3   3 3 3 3     expert 1 has none

How many tiles an expert has is known on the device alone.  The grid has a program for each tile that there can be; a
program finds its tile in the experts' ends, and returns if there is none.

Weights in MXFP4 are read as stored, and become numbers of the model's dtype in registers.
"""

# A condition on constants must be the only one of its `if`, so that one side only is compiled.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["combine_kernel", "product_kernel", "sort_kernel"]


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(index_ptr, order_ptr, ends_ptr, num_pairs, BLOCK: tl.constexpr):
    """Program e stores the pairs of expert e in ascending order, after those of smaller experts, and where they end.

    A counting sort: stable, so that the order of additions depends on the pairs alone.  Pairs of an expert below 0 are
    left out.
    """
    expert = tl.program_id(0)
    place = expert * 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        experts = tl.load(index_ptr + pairs, mask=pairs < num_pairs, other=-1)
        place += tl.sum(((experts >= 0) & (experts < expert)).to(tl.int32), 0)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_mine = tl.load(index_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert
        count = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(order_ptr + place + count - 1, pairs, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(ends_ptr + expert, place)


@triton.jit
def _locate(ends_ptr, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of a tile, and the places of its first row and of the expert's end; the expert is EXPERTS if none has it.

    EXPERTS is the power of 2 from NUM_EXPERTS.
    """
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < NUM_EXPERTS), other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tiles_up_to = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    is_mine = experts == expert
    first = tl.sum(tl.where(is_mine, starts + (tile - tiles_up_to + tiles) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(is_mine, ends, 0), 0)


@triton.jit
def _mxfp4_tile(words, scales, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Numbers [BLOCK_N, BLOCK_K] of int32 words [BLOCK_N, BLOCK_K / 8] of eight codes, and of the codes of scales.

    A word's inputs come in the order 0 4 1 5 2 6 3 7: a shift aligns two codes with the two halves of a word, and
    three more operations make two numbers of 16 bits of them.  The three bits without the sign become the lowest of
    the exponent and the highest of the mantissa, which is the number, subnormal ones included, times a power of 2.
    """
    # bfloat16 has 8 bits of exponent, biased by 127, and 7 of mantissa; float16 has 5, biased by 15, and 10.
    SHIFT: tl.constexpr = DTYPE.fp_mantissa_width - 1
    FACTOR: tl.constexpr = 2.0 ** (DTYPE.exponent_bias - 1)
    codes = words[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
    codes = ((codes & 0x00070007) << SHIFT) | ((codes & 0x00080008) << 12)
    low = (codes & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (codes >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    numbers = tl.join(low, high).reshape(BLOCK_N, BLOCK_K)
    powers = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True).to(DTYPE)  # code 0, which is 2^-127, becomes 0
    powers = tl.broadcast_to(powers[:, :, None], (BLOCK_N, BLOCK_K // 32, 32)).reshape(BLOCK_N, BLOCK_K)
    return numbers * tl.full((1, 1), FACTOR, tl.float32).to(DTYPE) * powers


@triton.jit
def _gate(sums, limit, alpha, CLAMPED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """float32 [BLOCK_N, BLOCK_M], gates in even rows -> [BLOCK_N / 2, BLOCK_M]"""
    gate, up = tl.split(tl.permute(sums.reshape(BLOCK_N // 2, 2, BLOCK_M), (0, 2, 1)))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate / (1.0 + tl.exp(-alpha * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_choices"])
def product_kernel(
    x_ptr, order_ptr, ends_ptr, values_ptr, scales_ptr, bias_ptr, out_ptr,
    num_choices, x_stride, expert_stride, output_stride, input_stride, limit, alpha,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    IS_FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of pairs times BLOCK_N outputs of its expert.

    IS_FIRST: rows of x are tokens, the outputs are gated, and those of a pair are stored at its place in the order.
    Otherwise rows of x are places, and a pair's outputs are stored at its number.  The weights are the first operand of
    the product, since the few rows of a decode step would leave most of a 64-row instruction empty.
    """
    tile = tl.program_id(0)
    expert, first, end = _locate(ends_ptr, tile, NUM_EXPERTS, EXPERTS, BLOCK_M)
    if expert == EXPERTS:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < end
    pairs = tl.load(order_ptr + places, mask=is_row, other=0)
    rows = (pairs // num_choices if IS_FIRST else places).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < NUM_OUTPUTS
    if IS_FIRST:
        if not INTERLEAVED:  # gate, up, gate, up, ... in the tile
            outputs = outputs // 2 + outputs % 2 * (NUM_OUTPUTS // 2)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    x_tile = x_ptr + rows[:, None] * x_stride
    weights = values_ptr + expert.to(tl.int64) * expert_stride + outputs.to(tl.int64)[:, None] * output_stride
    rows_of_scales = (expert.to(tl.int64) * NUM_OUTPUTS + outputs)[:, None] * (NUM_INPUTS // 32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_tile + inputs[None, :], mask=is_row[:, None] & (inputs < NUM_INPUTS)[None, :], other=0.0)
        if scales_ptr is None:
            inside = is_output[:, None] & (inputs < NUM_INPUTS)[None, :]
            w = tl.load(weights + inputs[None, :] * input_stride, mask=inside, other=0.0)
        else:
            words = start // 8 + tl.arange(0, BLOCK_K // 8)
            inside = is_output[:, None] & (words < NUM_INPUTS // 8)[None, :]
            codes = tl.load(weights + words[None, :], mask=inside, other=0)
            blocks = start // 32 + tl.arange(0, BLOCK_K // 32)
            inside = is_output[:, None] & (blocks < NUM_INPUTS // 32)[None, :]
            scales = tl.load(scales_ptr + rows_of_scales + blocks[None, :], mask=inside, other=0)
            w = _mxfp4_tile(codes, scales, x.dtype, BLOCK_N, BLOCK_K)
            x = tl.permute(x.reshape(BLOCK_M, BLOCK_K // 8, 2, 4), (0, 1, 3, 2)).reshape(BLOCK_M, BLOCK_K)
        sums = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), sums, input_precision="ieee")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * NUM_OUTPUTS + outputs, mask=is_output, other=0.0)
        sums += bias.to(tl.float32)[:, None]
    if IS_FIRST:
        results = _gate(sums, limit, alpha, CLAMPED, BLOCK_N, BLOCK_M).to(out_ptr.dtype.element_ty)
        columns = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = (columns < NUM_OUTPUTS // 2)[:, None] & is_row[None, :]
        tl.store(out_ptr + places.to(tl.int64)[None, :] * (NUM_OUTPUTS // 2) + columns[:, None], results, mask=inside)
    else:
        inside = is_output[:, None] & is_row[None, :]
        places_out = out_ptr + pairs.to(tl.int64)[None, :] * NUM_OUTPUTS + outputs[:, None]
        tl.store(places_out, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_choices"])
def combine_kernel(
    x_ptr, index_ptr, weights_ptr, out_ptr, num_choices,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a token's pairs, in float32, in the order of its choices.

    A pair of no expert was never computed, and is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in range(num_choices):
        pair = token * num_choices + choice
        expert = tl.load(index_ptr + pair)
        if (expert >= 0) & (expert < NUM_EXPERTS):
            x = tl.load(x_ptr + pair * WIDTH + columns, mask=columns < WIDTH, other=0.0)
            sums += x.to(tl.float32) * tl.load(weights_ptr + pair).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)
