"""The seam between a model's small operations and who computes them.

Between two matrix products a decoder does little arithmetic over much memory: norms, rotary
embedding, the gate of the MLP.  Each is one pass over its operands here, by a kernel in the Triton
language or (`reference.py`) torch, which give the same numbers up to rounding: inputs are read in
their own dtype, the arithmetic is float32.  (On a CPU a whole decoder is one native call: `cpu.py`.)
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["FusedOps"]


class FusedOps(Protocol):
    """One implementation of the small operations.  T tokens, H hidden, D head size, I MLP width.

    Rows may be strided (slices of a merged projection); the last dimension is contiguous.
    """

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] / sqrt(mean(x^2) + eps) * weight [H]; also for [T, heads, D] with weight [D]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += x [T, H] in place, rounded to its dtype; returns `rms_norm` of that rounded sum."""

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate query [T, Hq, D] and key [T, Hkv, D] in place by cos, sin [T, R], R <= D.

        The layout of transformers' `rotate_half`: element i < R/2 pairs with i + R/2; elements from
        R on stay as they are.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(left half) * right half."""
