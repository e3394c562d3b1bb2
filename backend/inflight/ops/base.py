"""The seam between a model's small operations and their implementations.

Between two matrix products a decoder does little arithmetic on much memory: norms, rotary embedding, the
MLP's gate.  On a GPU a kernel in the Triton language does each in one pass over its operands; the reference
uses torch.  Both compute in float32, whatever the dtype of the inputs, and agree up to rounding.  (On a CPU
a whole decoder is one native call: `loading/native_decoder.py`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["E4M3_MAX", "MIN_SCALE", "FusedOps", "QuantizedRows"]

E4M3_MAX = 448.0  # the largest number in float8_e4m3fn
MIN_SCALE = 1e-12  # of a row of zeros; its reciprocal is finite


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in eight bits, each with its own scale: the input of a linear layer whose weights are fp8.

    Attributes:
        values: float8_e4m3fn [T, H], contiguous; row / scale, rounded to nearest.
        scales: float32 [T]; the row's largest absolute value / E4M3_MAX, and at least MIN_SCALE.
    """

    values: Tensor
    scales: Tensor


class FusedOps(Protocol):
    """An implementation of the small operations.  T tokens, H hidden size, D head size, I MLP width.

    Rows may be strided (slices of a merged projection); the last dimension is contiguous.
    """

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] / sqrt(mean(x^2) + eps) * weight [H]; or x [T, heads, D] with weight [D]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += x [T, H] in place, rounded to its dtype; returns `rms_norm` of the rounded sum."""

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate query [T, Hq, D] and key [T, Hkv, D] in place by cos, sin [T, R], R <= D.

        The layout is that of transformers' `rotate_half`: element i < R/2 pairs with i + R/2; elements
        from R on are unchanged.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(left half) * right half."""

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        """x [T, H], each row with its own scale."""
