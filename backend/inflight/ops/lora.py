"""The seam between products of adapters (LoRA) on a device and the kernels that compute them; and its definition.

The adapters of a step are in *slots*.  For each product of the model, a slot has the matrices of one adapter: A of up
to MAX_PARTS layers with a common input, one below the other, and B of the same layers, whose outputs are side by side:

    x [T, K] -> A [P * R, K] -> [T, P, R] -> B [N, R], each part its own outputs -> added to y [T, N]

Ranks are padded with zeros to R, so that all adapters have tensors of one size at addresses that never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["MAX_PARTS", "MIN_RANK", "LoraOps", "LoraSlots", "ReferenceLora", "padded_rank"]

MAX_PARTS = 3  # query, key and value
MIN_RANK = 16  # of a product on tensor cores


def padded_rank(rank: int) -> int:
    """R for adapters of up to this rank: a power of 2."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


@dataclass(frozen=True)
class LoraSlots:
    """The matrices in all slots, S, for one product of the model.

    Attributes:
        a: [S, P * R, K]; slots may lie apart, each is contiguous.
        b: [S, N, R], likewise; the scale is part of it.
        sizes: outputs of each of the P layers; their sum is N.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        """R"""
        return self.b.shape[2]

    @property
    def starts(self) -> list[int]:
        """The first output of each layer, and N."""
        return [0, *accumulate(self.sizes)]


class LoraOps(Protocol):
    """An implementation.

    Attributes:
        name: for the log.
    """

    name: str

    def prepare(self, slots: LoraSlots, max_tokens: int) -> None:
        """Allocate the scratch that products of up to so many tokens need; all products share it."""

    def add(self, x: Tensor, slots: LoraSlots, slot_of_token: Tensor, y: Tensor) -> None:
        """Add to row t of y what slot `slot_of_token[t]` makes of row t of x; -1: the row keeps its bits.

        Both products have sums in float32; the first one is rounded to the dtype of `x`.  No row's result depends on
        another row.

        Args:
            x: [T, K], with contiguous rows.
            slot_of_token: int32 [T].
            y: [T, N], with contiguous rows, in the dtype of `x`.
        """


class ReferenceLora:
    """`LoraOps` by torch: what the products mean.  It launches the same whatever the slots are."""

    name = "reference"

    def prepare(self, slots: LoraSlots, max_tokens: int) -> None:
        pass

    def add(self, x: Tensor, slots: LoraSlots, slot_of_token: Tensor, y: Tensor) -> None:
        """See `LoraOps`."""
        rank, starts = slots.rank, slots.starts
        for slot, (a, b) in enumerate(zip(slots.a.float(), slots.b.float())):
            inner = (x.float() @ a.t()).to(x.dtype).float()
            parts = [
                inner[:, part * rank : (part + 1) * rank] @ b[start:end].t()
                for part, (start, end) in enumerate(pairwise(starts))
            ]
            own = (slot_of_token == slot)[:, None]
            y.copy_(torch.where(own, (y.float() + torch.cat(parts, dim=1)).to(y.dtype), y))
