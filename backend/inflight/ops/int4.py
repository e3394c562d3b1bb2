"""The seam between linear layers with weights in four bits and the kernels that multiply them; and its definition.

A weight [N, K] is cut into blocks of 2 * SPAN inputs.  An output's part of a block is SPAN bytes: their low nibbles are
the codes of the first SPAN inputs, their high ones those of the others.  So the two halves of a block are two products
with two slices of x, and nothing is interleaved between them:

    codes [K / (2 * SPAN), N, SPAN]     block 0: output 0, output 1, ...     block 1: output 0, ...

A group of inputs with a common scale is one or more spans.  Bytes 1 and 2 of every four are exchanged: a mask and a
shift of such a word give two numbers of 16 bits each, in the order of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SPANS", "ZERO", "Int4Ops", "Int4Weight", "ReferenceInt4", "span_of", "tiled"]

SPANS = (64, 32, 16)  # inputs of half a block: what a tensor core takes at once, at least
ZERO = 8  # the zero point of symmetric codes


def span_of(num_inputs: int, group: int) -> int | None:
    """The largest span for layers with so many inputs to a group; None if they cannot be cut into blocks."""
    return next((span for span in SPANS if group % span == 0 and num_inputs % (2 * span) == 0), None)


def tiled(codes: Tensor, span: int) -> Tensor:
    """uint8 [N, K], from 0 to 15 -> uint8 [K / (2 * span), N, span]"""
    halves = codes.view(len(codes), -1, 2, span)
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    return _exchanged(packed).transpose(0, 1).contiguous()


def _exchanged(packed: Tensor) -> Tensor:
    """uint8 [.., .., SPAN] with bytes 1 and 2 of every four in each other's place."""
    return packed.unflatten(2, (-1, 2, 2)).transpose(-1, -2).flatten(2)


@dataclass(frozen=True)
class Int4Weight:
    """weight[n, k] = (codes[n, k] - zero[g, n]) * scale[g, n], or codes[n, k] * scale[g, n] - min[g, n]

    Attributes:
        codes: uint8 [K / (2 * SPAN), N, SPAN], see above; blocks may lie apart, as those of a part of a merged layer.
        scales: float16, bfloat16 or float32 [K / G, N]; uint8 if there are factors.
        offsets: uint8 [K / G, N]: the zero of each group, or if there are factors its min; None: all zeros are `ZERO`.
        factors: float32 [2, N]: actual scale and min = scales * factors[0], offsets * factors[1].
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None

    @property
    def span(self) -> int:
        return self.codes.shape[2]

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def num_inputs(self) -> int:
        return 2 * self.codes.shape[0] * self.span

    @property
    def spans_per_group(self) -> int:
        return 2 * self.codes.shape[0] // len(self.scales)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K]; each number is computed in float32 and rounded once."""
        packed = _exchanged(self.codes)
        spans = torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1)  # [K / SPAN, N, SPAN]
        numbers = spans.to(torch.float32).view(len(self.scales), -1, self.num_outputs, self.span)
        scales = self.scales.to(torch.float32)[:, None, :, None]
        if self.factors is None:
            zeros = ZERO if self.offsets is None else self.offsets.to(torch.float32)[:, None, :, None]
            numbers = numbers.sub_(zeros).mul_(scales)
        else:
            assert self.offsets is not None
            mins = (self.offsets.to(torch.float32) * self.factors[1])[:, None, :, None]
            numbers = numbers.mul_(scales * self.factors[0][:, None]).sub_(mins)
        return numbers.permute(2, 0, 1, 3).flatten(1).to(dtype)


class Int4Ops(Protocol):
    """An implementation of products with weights in four bits.  M rows, K inputs, N outputs.

    Attributes:
        name: for the log.
        max_rows: products of up to so many rows give each row the same bits, however many there are.
    """

    name: str
    max_rows: int

    def prepare(self, weight: Int4Weight, dtype: torch.dtype) -> None:
        """Allocate the scratch that products of the layer need for inputs in `dtype`; layers share it."""

    def linear(self, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
        """x [M, K] times the transpose of the weight, plus bias [N]: [M, N] in the dtype of `x`.

        Sums are in float32 and rounded once; above `max_rows`, the weight is rounded to the dtype of `x` first.

        Args:
            x: bfloat16 or float16, with contiguous rows.
        """


class ReferenceInt4:
    """`Int4Ops` by torch: what the products mean."""

    name = "reference"
    max_rows = 64

    def prepare(self, weight: Int4Weight, dtype: torch.dtype) -> None:
        pass

    def linear(self, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
        """See `Int4Ops`."""
        if len(x) > self.max_rows:
            return F.linear(x, weight.dequantised(x.dtype), bias)
        # One row at a time, since the order of torch's additions may depend on their number.
        plain, wide = weight.dequantised(torch.float32), None if bias is None else bias.float()
        rows = [F.linear(row.float(), plain, wide) for row in x]
        return torch.stack(rows).to(x.dtype) if rows else x.new_empty(0, weight.num_outputs)
