"""The seam between linear layers with block-scaled fp8 weights and the kernel that multiplies them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["BLOCK_INPUTS", "BlockFp8Ops"]

BLOCK_INPUTS = 128  # divides the inputs of a block


class BlockFp8Ops(Protocol):
    """An implementation of products with weights in e4m3 that have a scale per block.  M rows, K inputs, N outputs."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None) -> Tensor:
        """x [M, K] times the transpose of weight, plus bias [N]: [M, N] in the dtype of `x`, bfloat16 or float16.

        Sums are in float32 and rounded once.

        Args:
            x: with contiguous rows; K is a multiple of 16.
            weight: e4m3 [N, K], contiguous.
            scale: float32 [cdiv(N, block[0]), cdiv(K, block[1])], contiguous; actual weight = weight * scale.
            block: outputs and inputs of a block; the inputs are a multiple of BLOCK_INPUTS.
        """

    def prepare(self, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None, like: Tensor) -> None:
        """Compile what `linear` launches for this layer, any M, and inputs of the dtype of `like`."""
