"""Weights of linear layers in the codes of their checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ROWS", "CodebookWeight", "Coded", "StoredWeight", "shortest"]

ROWS = 1024  # outputs that are dequantised at once, where a layer is dequantised in parts


class Coded(Protocol):
    """A weight [N, K] in codes.

    Attributes:
        shape: N and K.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Outputs from `start` up to `stop` (default: all): float32 [stop - start, K], in the order of the inputs."""


@dataclass(frozen=True)
class StoredWeight:
    """A `Coded` in integers: weight[n, k] = codes[n, k] * scales[n, g] - mins[n, g], g = k // group.

    Attributes:
        codes: uint8 [N, K], from 0 to 2**bits - 1, in the order in which groups are contiguous.
        bits: 4 or 8.
        group: inputs that share a scale; divides K.
        scales: float32 [N, K / group]; exactly the numbers that are stored, which may be negative.
        zeros: uint8 [N, K / group], integer zero points: mins = zeros * scales.  Of symmetric codes 2**(bits - 1).
        order: int64 [K]: codes[:, k] belongs to input order[k]; None if that is k.
    """

    codes: Tensor
    bits: int
    group: int
    scales: Tensor
    zeros: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.codes.shape
        return num_outputs, num_inputs

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """See `Coded`.  Each number is rounded once: (code - zero) * scale."""
        codes, scales, zeros = (x[start:stop] for x in (self.codes, self.scales, self.zeros))
        wide = codes.view(len(codes), scales.shape[1], self.group).to(torch.float32)
        out = wide.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1)
        if self.order is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.order, out)


@dataclass(frozen=True)
class CodebookWeight:
    """A `Coded` in indices of a table of 16 numbers: weight[n, k] = levels[code] * absmax[(n * K + k) // block].

    Attributes:
        packed: uint8 [ceil(N * K / 2)]; the first of two codes is in the four higher bits.
        levels: float32 [16].
        absmax: float32 [ceil(N * K / block)].
        block: numbers that share a scale; they may belong to two outputs.
    """

    packed: Tensor
    levels: Tensor
    absmax: Tensor
    block: int
    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """See `Coded`."""
        num_outputs, num_inputs = self.size
        first, last = start * num_inputs, (num_outputs if stop is None else min(stop, num_outputs)) * num_inputs
        part = self.packed[first // 2 : -(-last // 2)]
        codes = torch.stack((part >> 4, part & 15), -1).flatten()[first % 2 :][: last - first]
        numbers = self.levels[codes.int()]
        if num_inputs % self.block == 0:
            numbers.view(-1, self.block).mul_(self.absmax[first // self.block : last // self.block, None])
        else:
            numbers.mul_(self.absmax[torch.arange(first, last) // self.block])
        return numbers.view(-1, num_inputs)


def shortest(scales: Tensor) -> Tensor:
    """In the shortest dtype that has exactly these numbers."""
    shorter = (scales.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((x for x in shorter if torch.equal(x.to(scales.dtype), scales)), scales)
