"""The seam between a model's small operations and their implementations.

Between two matrix products a decoder does little arithmetic on much memory: norms, rotary embedding, the
MLP's gate.  On a GPU a kernel in the Triton language does each in one pass over its operands; the reference
uses torch.  Both compute in float32, whatever the dtype of the inputs, and agree up to rounding.  (On a CPU
a whole decoder is one native call: `loading/forward/native_decoder.py`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Union

import torch
from torch import Tensor

from inflight.attention.base import LayerAttention, LayerSpec

__all__ = ["E4M3_MAX", "MIN_SCALE", "Angles", "FusedOps", "HeadNorms", "QuantizedRows", "Rows", "projection_sizes"]

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


# Of a layer's input: [T, H] in the model's dtype, or quantized.
Rows = Union[Tensor, QuantizedRows]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of query and key.

    Attributes:
        query_weight, key_weight: [Dk].
        eps: of both.
    """

    query_weight: Tensor
    key_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Angles:
    """By what query and key of a step's tokens are rotated.

    Attributes:
        cos, sin: [P, R], in the model's dtype; or [P, R / 2] where both elements of a pair turn by the same angle.
        size: R, the elements of a head that are rotated; the others are unchanged.
        positions: int64 [T], each token's row of cos and sin; None if row t is token t's.
    """

    cos: Tensor
    sin: Tensor
    size: int
    positions: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether both elements of a pair have the same cos and sin."""
        return self.cos.shape[1] < self.size

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, R]."""
        tables = [self.cos, self.sin]
        if self.positions is not None:
            tables = [table[self.positions] for table in tables]
        cos, sin = (torch.cat([table, table], dim=-1) if self.shared else table for table in tables)
        return cos, sin


class FusedOps(Protocol):
    """An implementation of the small operations.  T tokens, H hidden size, D head size, I MLP width.

    Rows may be strided (slices of a merged projection); the last dimension is contiguous.  With `quantized`, the result
    is rounded to the dtype and then becomes `quantize_rows` of that.
    """

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, quantized: bool = False) -> Rows:
        """x [T, H] / sqrt(mean(x^2) + eps) * weight [H]; or, not quantized, x [T, heads, D] with weight [D]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0, quantized: bool = False
    ) -> Rows:
        """residual [T, H] += factor * x [T, H] in place, rounded to its dtype; returns the `rms_norm` of that."""

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate query [T, Hq, D] and key [T, Hkv, D] in place by cos, sin [T, R], R <= D.

        The layout is that of transformers' `rotate_half`: element i < R/2 pairs with i + R/2; elements
        from R on are unchanged.
        """

    def rotate_and_write(
        self, qkv: Tensor, layer: LayerAttention, batch: Any, norms: HeadNorms | None, angles: Angles | None
    ) -> Tensor:
        """What lies between a layer's merged projection and its attention.

        Normalises and rotates query and key, and stores key and value as `layer.backend.write` does.  Each step is
        rounded to the dtype.  Tokens of slot -1 are not stored.

        Args:
            qkv: [T, (Hq + Hkv) Dk + Hkv Dv], sizes of `layer.spec`; undefined afterwards.
            batch: what the backend's `prepare` returned.
            norms, angles: None leaves out the norms or the rotation.

        Returns:
            query [T, Hq, Dk].
        """

    def silu_and_mul(self, gate_up: Tensor, quantized: bool = False) -> Rows:
        """[T, 2 I] -> [T, I]: silu(left half) * right half."""

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        """x [T, H], each row with its own scale."""


def projection_sizes(spec: LayerSpec) -> list[int]:
    """Output features of the projections of query, key and value."""
    keys, values = spec.num_kv_heads * spec.key_head_size, spec.num_kv_heads * spec.value_head_size
    return [spec.num_heads * spec.key_head_size, keys, values]
