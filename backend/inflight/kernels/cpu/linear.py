"""Linear layers with packed weights, by `cpu_ops.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from inflight.kernels.cpu.library import DTYPE_CODES, allocate, library

__all__ = ["MAX_INT8_INPUTS", "LinearStruct", "PackedWeight", "address_of", "linear", "unsupported_weight"]

_ROWS = 4096  # quantized at once, in float32
MAX_INT8_INPUTS = (2**31 - 1) // 127**2  # more products of two bytes might overflow the sum, which has 32 bits


class LinearStruct(ctypes.Structure):
    """`Linear` of cpu_ops.h."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("dtype", c_int32),
        ("gated", c_int32),
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
        int8: store the weights in int8 with one scale per output feature (W8A8: the input is quantized
            per row).  Ignored unless in_features is a multiple of 4.

    Attributes:
        is_int8: whether the weights are stored in int8.
        struct: the layer's description for the kernel.
        address: of `struct`.

    Raises:
        ValueError: see `unsupported_weight`; or `int8` and more than `MAX_INT8_INPUTS` input features.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        gated: bool = False,
        int8: bool = False,
    ) -> None:
        for weight in weights:
            reason = unsupported_weight(weight)
            if reason is not None:
                raise ValueError(f"cannot pack {reason}; use torch's linear")
        self.dtype = weights[0].dtype
        self.sizes = [len(weight) for weight in weights]
        self.in_features = weights[0].shape[1]
        self.out_features = sum(self.sizes)
        self.num_results = self.out_features // 2 if gated else self.out_features
        self.is_int8 = int8 and self.in_features % 4 == 0
        if self.is_int8 and self.in_features > MAX_INT8_INPUTS:
            raise ValueError(f"int8 weights take at most {MAX_INT8_INPUTS} input features, not {self.in_features}")
        self.bias = _merged_bias(biases, self.sizes)
        plain = (weights[0] if len(weights) == 1 else torch.cat(list(weights))).contiguous()
        self.scales = self.offsets = None
        if self.is_int8:
            plain, self.scales, self.offsets = _quantized(plain)
        self.struct = LinearStruct(
            bias=address_of(self.bias),
            scales=address_of(self.scales),
            offsets=address_of(self.offsets),
            in_features=self.in_features,
            out_features=self.out_features,
            dtype=DTYPE_CODES[plain.dtype],
            gated=int(gated),
        )
        self.address = ctypes.addressof(self.struct)
        size = library().inflight_ops_packed_bytes(self.address) // plain.itemsize
        self.panels = allocate(size, dtype=plain.dtype)
        self.struct.panels = self.panels.data_ptr()
        library().inflight_ops_pack(self.address, plain.data_ptr(), torch.get_num_threads())

    def unpack(self) -> list[Tensor]:
        """The weights as they were given; weights in int8 as they are after quantization."""
        plain = torch.empty(self.out_features, self.in_features, dtype=self.panels.dtype)
        library().inflight_ops_unpack(self.address, plain.data_ptr(), torch.get_num_threads())
        if self.scales is not None:
            plain = (plain * self.scales[:, None]).to(self.dtype)
        return [part.clone() for part in plain.split(self.sizes)] if len(self.sizes) > 1 else [plain]


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [N, K] and float32 scales [N], nearest to `weight`; and 128 times the int8 row sums, int32 [N]."""
    rows, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), _ROWS):
        part = weight[start : start + _ROWS].float()
        scale = part.abs().amax(1) / 127
        scales[start : start + _ROWS] = scale
        rows[start : start + _ROWS] = (part / scale.clamp_min(1e-30)[:, None]).round_()
    return rows, scales, rows.sum(1, dtype=torch.int32) * 128


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
    out = x.new_empty(*x.shape[:-1], weight.num_results)
    rows = x.numel() // weight.in_features
    library().inflight_ops_linear(
        weight.address, x.data_ptr(), rows, DTYPE_CODES[x.dtype], out.data_ptr(), torch.get_num_threads()
    )
    return out
