"""Sums of adapters (LoRA) for the product of a layer: two launches, for rows of any adapters.

    shrink    x [T, K] times A of each row's slot    ->  sums [splits, T, P * R] in float32
    expand    those, added up in order, times B      ->  added to y [T, N]

A program has a tile of tokens and one slot: it leaves at once if no token of its tile has that slot, and stores only
the rows that have it.  So the launches depend on sizes alone, and a CUDA graph can contain them; rows need no sorting;
each row is written by one program; and a row without an adapter is written by none.

Up to MAX_SPLIT_ROWS rows, the inputs of the first product are split among programs, since A is read once and has few
outputs.  A larger product goes through the same splits one after another.  There are no atomics; splits, blocks and
their order follow from the size of the layer, and tiles of 16 and 64 tokens, which are the columns of a product on
tensor cores, multiply in the same order: a row's bits are the same in any batch.

Chen et al., Punica: Multi-Tenant LoRA Serving, arXiv:2310.18547 (SGMV)
Sheng et al., S-LoRA: Serving Thousands of Concurrent LoRA Adapters, arXiv:2311.03285
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gpu.launch import interpreted
from inflight.ops.lora import LoraSlots

__all__ = ["MAX_SPLIT_ROWS", "GpuLora", "splits_of"]

MAX_SPLIT_ROWS = 64
_FEW, _MANY = 16, 64  # tokens of a tile, up to MAX_SPLIT_ROWS rows and above
_BLOCK_K, _BLOCK_N, _MAX_BLOCK_R = 128, 64, 64
_MAX_SPLITS, _MIN_BLOCKS = 16, 2
_WARPS = 4
# Fixed, as the tiles are: what a search finds would differ between runs.  Loads of A are in flight, B is read once.
_STAGES = {_FEW: 4, _MANY: 3}
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def splits_of(num_inputs: int) -> tuple[int, int]:
    """How K inputs are split: the number of splits, and the blocks of each."""
    total = triton.cdiv(num_inputs, _BLOCK_K)
    blocks = triton.cdiv(total, max(1, min(_MAX_SPLITS, total // _MIN_BLOCKS)))
    return triton.cdiv(total, blocks), blocks


@triton.jit(do_not_specialize=["num_tokens", "blocks_per_split", "splits_per_program"])
def lora_shrink_kernel(
    x_ptr, a_ptr, slot_ptr, sums_ptr,
    num_tokens, num_inputs, blocks_per_split, splits_per_program, x_stride, a_slot_stride, sums_stride,
    NUM_TILES_R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BLOCK_R inner numbers of a tile of tokens, of one or all splits; grid (tiles, splits * NUM_TILES_R, slots)."""
    slot, width = tl.program_id(2), NUM_TILES_R * BLOCK_R
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        inner = tl.program_id(1) % NUM_TILES_R * BLOCK_R + tl.arange(0, BLOCK_R)
        program = tl.program_id(1) // NUM_TILES_R
        a_rows = a_ptr + slot.to(tl.int64) * a_slot_stride + inner.to(tl.int64)[:, None] * num_inputs
        x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
        last = (num_inputs + BLOCK_K - 1) // BLOCK_K
        total = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for split in range(program * splits_per_program, (program + 1) * splits_per_program):
            sums = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
            first = split * blocks_per_split
            for block in range(first, tl.minimum(first + blocks_per_split, last)):
                inputs = block * BLOCK_K + tl.arange(0, BLOCK_K)
                inside = inputs < num_inputs
                a = tl.load(a_rows + inputs[None, :], mask=inside[None, :], other=0.0)
                x = tl.load(x_rows + inputs[:, None], mask=inside[:, None] & own[None, :], other=0.0)
                sums = tl.dot(a.to(DOT), x.to(DOT), sums, input_precision="ieee")
            total += sums
        places = sums_ptr + program * sums_stride + tokens[None, :] * width + inner[:, None]
        tl.store(places, total, mask=own[None, :])


@triton.jit(do_not_specialize=["num_tokens", "splits", "first_tile_1", "first_tile_2", "start_1", "start_2"])
def lora_expand_kernel(
    sums_ptr, b_ptr, slot_ptr, y_ptr,
    num_tokens, splits, first_tile_1, first_tile_2, start_1, start_2, num_outputs, y_stride, b_slot_stride, sums_stride,
    WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one layer for a tile of tokens; grid (tiles of tokens, tiles of outputs, slots).

    The second and third layer begin at these tiles and outputs; of layers that there are not, behind the last one.
    """
    slot, tile = tl.program_id(2), tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        is_1, is_2 = tile >= first_tile_1, tile >= first_tile_2
        part = is_1.to(tl.int32) + is_2.to(tl.int32)
        start = tl.where(is_2, start_2, tl.where(is_1, start_1, 0))
        end = tl.where(is_2, num_outputs, tl.where(is_1, start_2, start_1))
        tile -= tl.where(is_2, first_tile_2, tl.where(is_1, first_tile_1, 0))
        outputs = start + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = outputs < end
        b_rows = b_ptr + slot.to(tl.int64) * b_slot_stride + outputs.to(tl.int64)[:, None] * RANK
        sums_rows = sums_ptr + tokens[None, :] * WIDTH + part * RANK
        added = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for block in tl.static_range(RANK // BLOCK_R):
            ranks = block * BLOCK_R + tl.arange(0, BLOCK_R)
            inner = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
            for split in range(splits):
                places = sums_rows + split * sums_stride + ranks[:, None]
                inner += tl.load(places, mask=own[None, :], other=0.0)
            b = tl.load(b_rows + ranks[None, :], mask=is_output[:, None], other=0.0)
            added = tl.dot(b.to(DOT), inner.to(DTYPE).to(DOT), added, input_precision="ieee")
        places = y_ptr + tokens.to(tl.int64)[None, :] * y_stride + outputs[:, None]
        inside = is_output[:, None] & own[None, :]
        y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, (y + added).to(y_ptr.dtype.element_ty), mask=inside)


class GpuLora:
    """`LoraOps` on a GPU; with the Triton language's interpreter, on any tensors.  A model's products share one."""

    name = "gpu"

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def prepare(self, slots: LoraSlots, max_tokens: int) -> None:
        """See `LoraOps.prepare`.  Steps run one after another, so one scratch is enough."""
        width, splits = slots.a.shape[1], splits_of(slots.a.shape[2])[0]
        needed = width * max(splits * min(MAX_SPLIT_ROWS, max_tokens), max_tokens)
        if self._sums is None or self._sums.numel() < needed:
            self._sums = torch.empty(needed, dtype=torch.float32, device=slots.a.device)

    def add(self, x: Tensor, slots: LoraSlots, slot_of_token: Tensor, y: Tensor) -> None:
        """See `LoraOps.add`."""
        num_tokens, (num_slots, width, num_inputs) = len(x), slots.a.shape
        if not num_tokens:
            return
        assert self._sums is not None and x.stride(1) == y.stride(1) == 1
        tile = _FEW if num_tokens <= MAX_SPLIT_ROWS else _MANY
        count, blocks = splits_of(num_inputs)
        programs = count if tile == _FEW else 1
        block_r = min(slots.rank, _MAX_BLOCK_R)
        # The interpreter multiplies the bits of bfloat16.
        dtype = _DTYPES[x.dtype]
        dot = tl.float32 if x.dtype == torch.bfloat16 and interpreted() else dtype
        tiles, sums_stride = triton.cdiv(num_tokens, tile), num_tokens * width
        lora_shrink_kernel[(tiles, programs * width // block_r, num_slots)](
            x, slots.a, slot_of_token, self._sums,
            num_tokens, num_inputs, blocks, count // programs, x.stride(0), slots.a.stride(0), sums_stride,
            NUM_TILES_R=width // block_r, BLOCK_R=block_r, BLOCK_M=tile, BLOCK_K=_BLOCK_K, DOT=dot,
            num_warps=_WARPS, num_stages=_STAGES[tile],
        )  # fmt: skip
        first_tiles, starts = _places(slots)
        lora_expand_kernel[(tiles, first_tiles[3], num_slots)](
            self._sums, slots.b, slot_of_token, y,
            num_tokens, programs, *first_tiles[1:3], *starts[1:], y.stride(0), slots.b.stride(0), sums_stride,
            WIDTH=width, RANK=slots.rank, BLOCK_R=block_r, BLOCK_M=tile, BLOCK_N=_BLOCK_N, DTYPE=dtype, DOT=dot,
            num_warps=_WARPS,
        )  # fmt: skip


def _places(slots: LoraSlots) -> tuple[list[int], list[int]]:
    """First tile and first output of three layers, and the ends; the layers that there are not are behind the last."""
    tiles, starts = [0], slots.starts
    for size in slots.sizes:
        tiles.append(tiles[-1] + triton.cdiv(size, _BLOCK_N))
    return [*tiles, *[tiles[-1]] * (4 - len(tiles))], [*starts, *[starts[-1]] * (4 - len(starts))]
