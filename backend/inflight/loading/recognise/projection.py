"""Linear layers as fused operations take them: plain, in fp8 or in four bits, one by one or merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.loading.load_errors import NotRecognised
from inflight.loading.quantization.block_fp8_linear import BlockFp8Linear
from inflight.loading.quantization.coded_linear import CodedLinear
from inflight.loading.quantization.fp8_linear import Fp8Linear
from inflight.loading.quantization.int4_linear import Int4Linear, can_merge
from inflight.ops.base import QuantizedRows

__all__ = ["Added", "Linear", "Projection", "is_linear", "result_like", "takes_quantized"]

Linear = nn.Linear | Fp8Linear | BlockFp8Linear | Int4Linear | CodedLinear
# Takes x and what a product has computed of it; returns this with what adapters add, perhaps in place.
Added = Callable[[Tensor, Tensor], Tensor]


def is_linear(module: object) -> bool:
    """Whether it computes what its class does; subclasses may add to it."""
    return type(module) in (nn.Linear, Fp8Linear, BlockFp8Linear, Int4Linear, CodedLinear)


def takes_quantized(linear: nn.Module) -> bool:
    """Whether what computes the layer's input should quantize it."""
    return isinstance(linear, Fp8Linear)


def result_like(linear: Linear) -> Tensor:
    """An empty tensor on the layer's device, in the dtype of its inputs and results."""
    if isinstance(linear, nn.Linear):
        return linear.weight.new_empty(0)
    if isinstance(linear, CodedLinear):
        return torch.empty(0, dtype=linear.dtype)
    stored = linear.codes if isinstance(linear, Int4Linear) else linear.weight
    return stored.new_empty(0, dtype=linear.dtype)


@dataclass
class Projection:
    """Linear layers with a common input; their outputs are concatenated.

    Attributes:
        weight, bias: those of all layers, once they are merged and if they are plain.
        fp8, block_fp8, int4: all layers in one, once they are merged and if they are in fp8 or in four bits.
        added: for the outputs of all layers; see `attach`.
    """

    linears: Sequence[Linear]
    weight: Tensor | None = None
    bias: Tensor | None = None
    fp8: Fp8Linear | None = None
    block_fp8: BlockFp8Linear | None = None
    int4: Int4Linear | None = None
    added: Added | None = None

    def __call__(self, x: Tensor | QuantizedRows) -> Tensor:
        """x [T, K], quantized only if `takes_quantized` -> [T, N]."""
        y = self._product(x)
        return self.added(x, y) if self.added is not None and isinstance(x, Tensor) else y

    def _product(self, x: Tensor | QuantizedRows) -> Tensor:
        if self.fp8 is not None:
            return self.fp8(x)
        if isinstance(x, Tensor) and self.block_fp8 is not None:
            return self.block_fp8(x)
        if isinstance(x, Tensor) and self.int4 is not None:
            return self.int4(x)
        if isinstance(x, Tensor) and self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        return torch.cat([linear(x) for linear in self.linears], dim=-1)

    def attach(self, added: Added | None) -> None:
        """From now on pass the outputs to `added`; None: no longer."""
        self.added = added

    @property
    def in_features(self) -> int:
        return self.linears[0].in_features

    @property
    def takes_quantized(self) -> bool:
        """Whether what computes the input of all layers should quantize it."""
        return all(takes_quantized(linear) for linear in self.linears)

    def merge(self) -> None:
        """Compute all layers in one product; their parameters become views of the merged ones.

        Raises:
            NotRecognised: some layers only have a bias or are in fp8 or four bits, or dtypes differ.
        """
        first = self.linears[0]
        if len({(result_like(linear).dtype, type(linear), linear.bias is None) for linear in self.linears}) > 1:
            raise NotRecognised("the layers of one projection differ in dtype, or in whether they have a bias")
        if isinstance(first, Fp8Linear):
            self.fp8 = first if len(self.linears) == 1 else Fp8Linear.merged(self.linears)  # type: ignore[arg-type]
            return
        if isinstance(first, BlockFp8Linear):
            self._merge_blocks(self.linears)  # type: ignore[arg-type]
            return
        if isinstance(first, Int4Linear):
            self._merge_int4(self.linears)  # type: ignore[arg-type]
            return
        if isinstance(first, CodedLinear):
            raise NotRecognised("codes of a CPU are merged when they are packed")
        self.weight = _merged([linear.weight for linear in self.linears])  # type: ignore[misc]
        self.bias = None if first.bias is None else _merged([linear.bias for linear in self.linears])  # type: ignore[misc]

    def _merge_blocks(self, linears: Sequence[BlockFp8Linear]) -> None:
        """Layers with blocks that would span two of them stay single."""
        if len(linears) == 1:
            self.block_fp8 = linears[0]
        elif not any(linear.out_features % linear.block[0] for linear in linears[:-1]):
            self.block_fp8 = BlockFp8Linear.merged(linears)

    def _merge_int4(self, linears: Sequence[Int4Linear]) -> None:
        """Layers that read their inputs in other orders, or have other groups, stay single."""
        if len(linears) == 1:
            self.int4 = linears[0]
        elif can_merge(linears):
            self.int4 = Int4Linear.merged(linears)


def _merged(parts: list[Tensor]) -> Tensor:
    """The parts, concatenated; they become views of the result."""
    if len(parts) == 1:
        return parts[0].data
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts])):
        part.data = view
    return whole
