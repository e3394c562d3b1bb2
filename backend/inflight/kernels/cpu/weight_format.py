"""How a packed linear layer stores its weights: in their own dtype, or in int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["INT8", "MAX_INT8_INPUTS", "PLAIN", "Codes", "WeightFormat"]

_ROWS = 4096  # quantized at once, in float32
MAX_INT8_INPUTS = (2**31 - 1) // 127**2  # more products of two bytes might overflow the sum, which has 32 bits


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] as the kernel reads it, before it is put in panels.

    Attributes:
        values: [N, K]; its dtype selects the kernel.
        scales: float32 [N]; weight = values * scales[:, None].  None if the values are the weights.
        offsets: int32 [N], what the kernel subtracts from a sum of products with unsigned inputs; None likewise.
    """

    values: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None


class WeightFormat(Protocol):
    """One way to store a layer's weights.  `PackedWeight` packs the result of `encode`, whatever the format."""

    def unsupported(self, in_features: int) -> str | None:
        """Why a layer with so many inputs cannot be stored; None if it can."""

    def encode(self, weight: Tensor) -> Codes:
        """The codes of weight [N, K] in float32, bfloat16 or float16, contiguous; `unsupported(K)` is None."""


class PlainFormat:
    """A `WeightFormat`: as the weights are."""

    def unsupported(self, in_features: int) -> str | None:
        return None

    def encode(self, weight: Tensor) -> Codes:
        return Codes(weight)


class Int8Format:
    """A `WeightFormat`: int8 with one scale per output feature.  The kernel quantizes inputs per row (W8A8).

    Weights stay as they are unless K is a multiple of 4.
    """

    def unsupported(self, in_features: int) -> str | None:
        if in_features <= MAX_INT8_INPUTS:
            return None
        return f"{in_features} inputs, and sums of more than {MAX_INT8_INPUTS} products of bytes overflow 32 bits"

    def encode(self, weight: Tensor) -> Codes:
        if weight.shape[1] % 4:
            return Codes(weight)
        values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        for start in range(0, len(weight), _ROWS):
            part = weight[start : start + _ROWS].float()
            scale = part.abs().amax(1) / 127
            scales[start : start + _ROWS] = scale
            values[start : start + _ROWS] = (part / scale.clamp_min(1e-30)[:, None]).round_()
        return Codes(values, scales, values.sum(1, dtype=torch.int32) * 128)  # inputs are stored plus 128


PLAIN = PlainFormat()
INT8 = Int8Format()
