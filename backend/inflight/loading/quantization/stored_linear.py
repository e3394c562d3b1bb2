"""Linear layers as a checkpoint stores them in integers: made before anything is read, so that nothing dense is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.loading.quantization.packing import Header, Packing
from inflight.loading.quantization.stored_weight import ROWS, Coded

__all__ = ["StoredLinear", "layer_of"]

_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class StoredLinear(nn.Module):
    """Takes the place of an `nn.Linear`; its buffers have the names, dtypes and shapes of the checkpoint's tensors.

    Attributes:
        name: of the layer, for messages.
        bias: [N] in the model's dtype, or None; some checkpoints add one, of zeros, to layers without.
        elsewhere: tensors of the layer whose names contain a dot, which no buffer's can, and their names in the files.
        further: those tensors.
    """

    bias: Tensor | None

    def __init__(self, name: str, linear: nn.Linear, packing: Packing, found: Mapping[str, Header]) -> None:
        """On the current device, without contents.

        Args:
            found: all tensors that the files have of the layer.

        Raises:
            LoadError: one is missing, or has another dtype or shape than it must have.
        """
        super().__init__()
        self.name = name
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._packing = packing
        tensors = packing.tensors(name, (self.out_features, self.in_features), found)
        self._names = [tensor for tensor in tensors if "." not in tensor]
        self.elsewhere = {tensor: f"{name}.{tensor}" for tensor in tensors if "." in tensor}
        self.further: dict[str, Tensor] = {}
        for tensor in self._names:
            dtype, shape = tensors[tensor]
            self.register_buffer(tensor, torch.empty(shape, dtype=_DTYPES[dtype]))
        self._must_have_bias = linear.bias is not None
        has_bias = self._must_have_bias or "bias" in found
        self.register_buffer("bias", torch.empty(self.out_features, dtype=linear.weight.dtype) if has_bias else None)

    def coded(self) -> Coded:
        """The weight.

        Raises:
            LoadError: numbers in a tensor mean nothing.
        """
        tensors = {name: self.get_buffer(name) for name in self._names} | self.further
        return self._packing.weight(self.name, (self.out_features, self.in_features), tensors)

    def own_bias(self) -> Tensor | None:
        """The bias, unless it is one of zeros that the model does not have."""
        if self.bias is None or (not self._must_have_bias and not bool(self.bias.any())):
            return None
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]: the definition.  Computed in float32, some outputs at a time."""
        weight, wide = self.coded(), x.to(torch.float32)
        bias = None if self.bias is None else self.bias.to(torch.float32)
        parts = [
            F.linear(wide, weight.dequantize(start, start + ROWS), None if bias is None else bias[start : start + ROWS])
            for start in range(0, self.out_features, ROWS)
        ]
        return torch.cat(parts, -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._packing}"


def layer_of(weight: Coded, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """The module that multiplies with a weight, in a model of `dtype`.

    A plain linear layer, whose weight is rounded once.  Layers that keep their codes are made by `Int4Codes` of a GPU
    and `CpuCodes`.
    """
    num_outputs, num_inputs = weight.shape
    plain = torch.empty(num_outputs, num_inputs, dtype=dtype)
    for start in range(0, num_outputs, ROWS):
        plain[start : start + ROWS] = weight.dequantize(start, start + ROWS)
    linear = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(plain, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
