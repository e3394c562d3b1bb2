"""Weights in the blocks of llama.cpp: codes with a scale, and some with a minimum, each 16 or 32 numbers.

Layouts: ggml-common.h and dequantize_row_* in ggml-quants.c of https://github.com/ggml-org/ggml
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLOCK_KINDS", "BlockKind", "BlockParts", "BlockWeight"]


class BlockParts(NamedTuple):
    """The contents of blocks [B, bytes]: number[b, i] = scales[b, g] * (codes[b, i] - zero) - mins[b, g], g = i // G.

    Attributes:
        codes: uint8 [B, numbers], from 0 on.
        zero: of all codes.
        scale: float32 [B, 1], of the block; `scales` = scale * scale_codes.
        scale_codes: integers [B, numbers / G]; None: one group, whose scale is the block's.
        min: float32 [B, 1]; `mins` = min * min_codes; None: 0.
        min_codes: integers [B, numbers / G]; None: one group.
    """

    codes: Tensor
    zero: int
    scale: Tensor
    scale_codes: Tensor | None = None
    min: Tensor | None = None
    min_codes: Tensor | None = None

    def numbers(self) -> Tensor:
        """float32 [B, numbers], in the order of operations of llama.cpp, bit for bit."""
        scales = self.scale if self.scale_codes is None else self.scale * self.scale_codes
        wide = self.codes.view(len(self.codes), scales.shape[1], -1).to(torch.float32)
        if self.zero:
            wide.sub_(self.zero)
        wide.mul_(scales[..., None])
        if self.min is not None:
            wide.sub_((self.min if self.min_codes is None else self.min * self.min_codes)[..., None])
        return wide.flatten(1)


class BlockKind(NamedTuple):
    """
    Attributes:
        halves: offsets of the numbers in float16 in a block, which must be finite; the first is the scale.
        read: uint8 [B, num_bytes] -> their parts; None: only `numbers_of` knows what they mean.
        numbers_of: uint8 [B, num_bytes] -> float32 [B, numbers].
        bits: that hold each of the codes of `read`; None: it has none.
    """

    name: str
    numbers: int
    num_bytes: int
    halves: tuple[int, ...]
    read: Callable[[Tensor], BlockParts] | None
    numbers_of: Callable[[Tensor], Tensor]
    bits: int | None = None


@dataclass(frozen=True)
class BlockWeight:
    """A `Coded` in the bytes of its file.

    Attributes:
        blocks: uint8 [N, K / numbers * num_bytes].
    """

    kind: BlockKind
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_bytes = self.blocks.shape
        return num_outputs, num_bytes // self.kind.num_bytes * self.kind.numbers

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """See `Coded`."""
        part = self.blocks[start:stop]
        return self.kind.numbers_of(part.reshape(-1, self.kind.num_bytes)).view(len(part), -1)

    def parts(self, start: int = 0, stop: int | None = None) -> BlockParts | None:
        """Codes and scales of outputs from `start` up to `stop`, for a kernel; None: this kind has no others."""
        blocks = self.blocks[start:stop].reshape(-1, self.kind.num_bytes)
        return None if self.kind.read is None else self.kind.read(blocks)

    def halves(self) -> Tensor:
        """float32 [N * K / numbers, H]: the numbers in float16 of each block, the scale first."""
        blocks = self.blocks.reshape(-1, self.kind.num_bytes)
        return torch.cat([_half(blocks, offset) for offset in self.kind.halves], 1)


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).to(torch.float32)


def _fields(octets: Tensor, bits: int) -> Tensor:
    """uint8 [B, ..., W] -> [B, ..., 8 / bits, W]: the lowest bits of all W bytes, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (octets[..., None, :] >> shifts) & (2**bits - 1)


def _nibbles(octets: Tensor, width: int) -> Tensor:
    """uint8 [B, W] -> [B, 2 W]: of each `width` bytes the low halves, then the high ones."""
    return _fields(octets.reshape(len(octets), -1, width), 4).flatten(1)


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 2:], 16), 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 4:], 16), 0, _half(blocks, 0), min=-_half(blocks, 2))


def _fifth_bits(octets: Tensor) -> Tensor:
    """uint8 [B, 4] -> [B, 32]: bit i, the lowest first, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((octets[..., None] >> shifts) & 1) << 4).flatten(1)


def _q5_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return BlockParts(codes, 0, _half(blocks, 0), min=-_half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:] ^ 128, 128, _half(blocks, 0))  # from two's complement to an offset of 128


def _six_bits(octets: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [B, 12] -> scales and minimums [B, 8]: the last four of each have their highest two bits apart."""
    first, second, third = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)


def _k_parts(blocks: Tensor, codes: Tensor) -> BlockParts:
    scales, mins = _six_bits(blocks[:, 4:16])
    return BlockParts(codes, 0, _half(blocks, 0), scales, _half(blocks, 2), mins)


def _q4_k(blocks: Tensor) -> BlockParts:
    return _k_parts(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> BlockParts:
    high = _fields(blocks[:, 16:48], 1).flatten(1) << 4
    return _k_parts(blocks, _nibbles(blocks[:, 48:], 32) | high)


def _q6_k(blocks: Tensor) -> BlockParts:
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1) << 4
    codes = _nibbles(blocks[:, :128], 64) | high
    return BlockParts(codes, 32, _half(blocks, 208), blocks[:, 192:208].contiguous().view(torch.int8))


def _by_transformers(number: int) -> Callable[[Tensor], Tensor]:
    """Of formats of fewer bits, whose codes no kernel will read."""

    def numbers_of(blocks: Tensor) -> Tensor:
        from transformers.integrations.gguf.dequant import dequantize

        return dequantize(blocks.contiguous().flatten(), number, torch.float32).view(len(blocks), -1)

    return numbers_of


def _kind(
    name: str, bits: int, numbers: int, num_bytes: int, halves: tuple[int, ...], read: Callable[[Tensor], BlockParts]
) -> BlockKind:
    return BlockKind(name, numbers, num_bytes, halves, read, lambda blocks: read(blocks).numbers(), bits)


BLOCK_KINDS: dict[str, BlockKind] = {
    kind.name: kind
    for kind in (
        _kind("Q4_0", 4, 32, 18, (0,), _q4_0),
        _kind("Q4_1", 4, 32, 20, (0, 2), _q4_1),
        _kind("Q5_0", 6, 32, 22, (0,), _q5_0),
        _kind("Q5_1", 6, 32, 24, (0, 2), _q5_1),
        _kind("Q8_0", 8, 32, 34, (0,), _q8_0),
        _kind("Q4_K", 4, 256, 144, (0, 2), _q4_k),
        _kind("Q5_K", 6, 256, 176, (0, 2), _q5_k),
        _kind("Q6_K", 6, 256, 210, (208,), _q6_k),
        BlockKind("Q2_K", 256, 84, (80, 82), None, _by_transformers(10)),
        BlockKind("Q3_K", 256, 110, (108,), None, _by_transformers(11)),
        BlockKind("IQ2_XXS", 256, 66, (0,), None, _by_transformers(16)),
        BlockKind("IQ2_XS", 256, 74, (0,), None, _by_transformers(17)),
        BlockKind("IQ3_XXS", 256, 98, (0,), None, _by_transformers(18)),
        BlockKind("IQ1_S", 256, 50, (0,), None, _by_transformers(19)),
        BlockKind("IQ4_NL", 32, 18, (0,), None, _by_transformers(20)),
        BlockKind("IQ3_S", 256, 110, (0,), None, _by_transformers(21)),
        BlockKind("IQ2_S", 256, 82, (0,), None, _by_transformers(22)),
        BlockKind("IQ4_XS", 256, 136, (0,), None, _by_transformers(23)),
    )
}
