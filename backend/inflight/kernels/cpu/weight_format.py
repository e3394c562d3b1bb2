"""How a packed linear layer stores its weights: in their own dtype, or in int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["INT8", "PLAIN", "Codes", "WeightFormat"]

_ROWS = 4096  # quantized at once, in float32
_ZERO = 128  # the code of zero: codes are unsigned


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] as the kernel reads it, before it is put in panels.

    Attributes:
        values: [N, K]; the weights, or uint8: weight = (values - 128) * scales[:, None].
        scales: float32 [N]; None if the values are the weights.
    """

    values: Tensor
    scales: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The weights that these codes stand for, [N, K]."""
        return self.values if self.scales is None else (self.values.float() - _ZERO) * self.scales[:, None]


class WeightFormat(Protocol):
    """One way to store a layer's weights.  `PackedWeight` packs the result of `encode`, whatever the format."""

    def encode(self, weight: Tensor) -> Codes:
        """The codes of weight [N, K] in float32, bfloat16 or float16, contiguous."""


class PlainFormat:
    """A `WeightFormat`: as the weights are."""

    def encode(self, weight: Tensor) -> Codes:
        return Codes(weight)


class Int8Format:
    """A `WeightFormat`: eight bits, symmetric, with a scale per output feature.

    The kernel quantizes inputs to eight bits, too, with a scale per row and group of 64 (cpu_ops.h).  Weights stay as
    they are unless K is a multiple of 4.
    """

    def encode(self, weight: Tensor) -> Codes:
        if weight.shape[1] % 4:
            return Codes(weight)
        values, scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(len(weight))
        for start in range(0, len(weight), _ROWS):
            part = weight[start : start + _ROWS].float()
            scale = part.abs().amax(1) / 127
            scales[start : start + _ROWS] = scale
            values[start : start + _ROWS] = (part / scale.clamp_min(1e-30)[:, None]).round_().add_(_ZERO)
        return Codes(values, scales)


PLAIN = PlainFormat()
INT8 = Int8Format()
