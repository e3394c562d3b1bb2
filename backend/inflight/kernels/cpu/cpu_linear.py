"""Linear layers with packed weights, by `cpu_ops.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from inflight.kernels.cpu.library import DTYPE_CODES, allocate, library
from inflight.kernels.cpu.stored_codes import LAYOUT, StoredCodes
from inflight.kernels.cpu.weight_format import PLAIN, Codes, WeightFormat, empty_codes

__all__ = ["LinearStruct", "PackedWeight", "address_of", "linear", "unsupported_weight"]


class LinearStruct(ctypes.Structure):
    """`Linear` of cpu_ops.h."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("mins", c_void_p),
        ("next", c_void_p),
        ("order", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("dtype", c_int32),
        ("gated", c_int32),
        ("input_group", c_int32),
        *LAYOUT,
    ]


def unsupported_weight(weight: Tensor) -> str | None:
    """Why `weight` [out_features, in_features] cannot be packed; None if it can."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {weight.dtype}"
    if weight.dim() != 2 or not weight.is_cpu:
        return f"a weight of shape {list(weight.shape)} on {weight.device}"
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return f"an odd number of input features ({weight.shape[1]}) in bfloat16"
    return None


class PackedWeight:
    """A linear layer's weights in the order in which the kernel reads them.

    Args:
        weights: [n_i, in_features] each, all of one dtype; together they form one layer of sum(n_i) features.
        biases: [n_i] or None for each weight.
        gated: the weights are a gate and an equally large second operand; results are silu(gate) * operand.
        stored_as: the format of the weights.

    Attributes:
        scales, mins: float32 [out_features] of the stored codes; None if they have none.
        order: int32 [in_features]: input k of the panels is input order[k]; None if that is k.
        further: more outputs, in another format, that `chain` put behind these.
        struct: the layer's description for the kernel.
        address: of `struct`.

    Raises:
        ValueError: see `unsupported_weight`.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        gated: bool = False,
        stored_as: WeightFormat = PLAIN,
    ) -> None:
        for weight in weights:
            reason = unsupported_weight(weight)
            if reason is not None:
                raise ValueError(f"cannot pack {reason}; use torch's linear")
        codes = stored_as.encode((weights[0] if len(weights) == 1 else torch.cat(list(weights))).contiguous())
        self._fill(codes, weights[0].dtype, (weights[0].shape[1], [len(weight) for weight in weights]), biases, gated)

    @classmethod
    def of_codes(
        cls,
        codes: Codes,
        dtype: torch.dtype,
        size: tuple[int, Sequence[int]],
        biases: Sequence[Tensor | None] = (),
        gated: bool = False,
    ) -> PackedWeight:
        """A weight that is in codes already.

        Args:
            dtype: of `unpack`.
            size: in_features, and the outputs of each part.
        """
        made = cls.__new__(cls)
        made._fill(codes, dtype, size, biases, gated)
        return made

    def _fill(
        self,
        codes: Codes,
        dtype: torch.dtype,
        size: tuple[int, Sequence[int]],
        biases: Sequence[Tensor | None],
        gated: bool,
    ) -> None:
        self.dtype = dtype
        self.in_features, self.sizes = size[0], list(size[1])
        self.out_features = sum(self.sizes)
        self.num_results = self.out_features // 2 if gated else self.out_features
        self.bias = _merged_bias(biases, self.sizes)
        self.scales, self.mins = codes.scales, codes.mins
        self.order: Tensor | None = getattr(codes, "order", None)
        self.further: PackedWeight | None = None
        self.struct = LinearStruct(
            bias=address_of(self.bias),
            scales=address_of(self.scales),
            mins=address_of(self.mins),
            order=address_of(self.order),
            in_features=self.in_features,
            out_features=self.out_features,
            dtype=codes.dtype,
            gated=int(gated),
            input_group=codes.input_group,
            **(codes.layout if isinstance(codes, StoredCodes) else {}),
        )
        self.address = ctypes.addressof(self.struct)
        count = library().inflight_ops_packed_bytes(self.address) // codes.storage.itemsize
        self.panels = allocate(count, dtype=codes.storage)
        self.struct.panels = self.panels.data_ptr()
        codes.pack(self.address)

    def unpack(self) -> list[Tensor]:
        """The weights as they were given, or as their codes say."""
        plain = self.codes().dequantize().to(self.dtype)
        return [part.clone() for part in plain.split(self.sizes)] if len(self.sizes) > 1 else [plain]

    def codes(self) -> Codes:
        """The codes that the panels hold."""
        size = self.out_features, self.in_features
        codes: Codes
        if self.struct.dtype == StoredCodes.dtype:
            codes = StoredCodes.empty(size, self.struct, self.order)
        else:
            codes = empty_codes(size, self.panels.dtype, self.scales, self.mins, self.struct.input_group)
        codes.unpack(self.address)
        return codes

    def joins(self, other: PackedWeight) -> bool:
        """Whether the codes of both can be those of one weight: of one kind, in the same groups and order."""
        names = ("in_features", "dtype", "input_group", *(name for name, _ in LAYOUT))
        if any(getattr(self.struct, name) != getattr(other.struct, name) for name in names):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def chain(self, further: PackedWeight | None) -> None:
        """Put the results of `further`, a weight of the same inputs, behind these; None: nothing."""
        self.further = further
        self.struct.next = None if further is None else further.address


def _merged_bias(biases: Sequence[Tensor | None], sizes: list[int]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros(n) if bias is None else bias.float() for bias, n in zip(biases, sizes)])


def address_of(tensor: Tensor | None) -> int | None:
    """Address of the first element, for structs of the C ABI."""
    return None if tensor is None else tensor.data_ptr()


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """The product of x [..., in_features] and the weight, plus its bias: [..., results], in x's dtype."""
    x = x.contiguous()
    assert weight.further is None
    out = x.new_empty(*x.shape[:-1], weight.num_results)
    rows = x.numel() // weight.in_features
    library().inflight_ops_linear(
        weight.address, x.data_ptr(), rows, DTYPE_CODES[x.dtype], out.data_ptr(), torch.get_num_threads()
    )
    return out
