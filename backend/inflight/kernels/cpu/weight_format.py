"""How a packed linear layer stores its weights: in their own dtype, or in codes of eight or four bits."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.kernels.cpu.library import DTYPE_CODES, library
from inflight.kernels.cpu.stored_codes import StoredCodes

__all__ = [
    "FINE_INT8",
    "INT4",
    "INT6",
    "INT8",
    "PLAIN",
    "UNCHANGED",
    "Codes",
    "Codes4",
    "Codes8",
    "Formats",
    "Values",
    "WeightFormat",
]

_ROWS = 4096  # quantized at once, in float32
_ZERO = 128  # the code of zero in eight bits: codes are unsigned
_GROUP, _FINE_GROUP = 64, 32  # kInputGroup and kFineGroup of cpu_ops.h
_ZERO6, _LARGEST6 = 32, 31
_SMALLEST_HALF = 2.0**-14  # of full precision
_CODES8, _CODES4 = 4, 5  # their dtypes, after those of library.DTYPE_CODES


class Codes(Protocol):
    """A weight [N, K] as the kernel reads it, before it is put in panels.

    Attributes:
        dtype: `Linear.dtype` of cpu_ops.h.
        storage: dtype of the panels.
        scales: float32 [N], or None.
        mins: float32 [N], or None.
        input_group: inputs that share a scale; 0 if they are not quantized.
    """

    @property
    def dtype(self) -> int: ...

    @property
    def storage(self) -> torch.dtype: ...

    @property
    def scales(self) -> Tensor | None: ...

    @property
    def mins(self) -> Tensor | None: ...

    @property
    def input_group(self) -> int: ...

    def pack(self, linear: int) -> None:
        """Write the panels of the `Linear` at this address."""

    def unpack(self, linear: int) -> None:
        """Fill the codes from the panels of the `Linear` at this address."""

    def dequantize(self) -> Tensor:
        """The weights that these codes stand for, [N, K]."""


@dataclass(frozen=True)
class Values:
    """`Codes`: the weights themselves, [N, K]."""

    values: Tensor
    scales = mins = None
    input_group = 0

    @property
    def dtype(self) -> int:
        return DTYPE_CODES[self.values.dtype]

    @property
    def storage(self) -> torch.dtype:
        return self.values.dtype

    def pack(self, linear: int) -> None:
        library().inflight_ops_pack(linear, self.values.data_ptr(), torch.get_num_threads())

    def unpack(self, linear: int) -> None:
        library().inflight_ops_unpack(linear, self.values.data_ptr(), torch.get_num_threads())

    def dequantize(self) -> Tensor:
        return self.values


@dataclass(frozen=True)
class Codes8:
    """`Codes` of eight bits: weight = (values - 128) * scales[:, None].

    Attributes:
        values: uint8 [N, K].
    """

    values: Tensor
    scales: Tensor
    input_group: int
    mins = None
    dtype = _CODES8
    storage = torch.uint8

    def pack(self, linear: int) -> None:
        library().inflight_ops_pack(linear, self.values.data_ptr(), torch.get_num_threads())

    def unpack(self, linear: int) -> None:
        library().inflight_ops_unpack(linear, self.values.data_ptr(), torch.get_num_threads())

    def affine(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `StoredCodes`."""
        return torch.full((len(self.scales), 1), float(_ZERO)), self.scales[:, None], None

    def dequantize(self) -> Tensor:
        return (self.values.float() - _ZERO) * self.scales[:, None]


class _PlainCodes4(ctypes.Structure):
    """`PlainCodes4` of cpu_ops.h."""

    _fields_ = [("codes", c_void_p), ("scales", c_void_p), ("mins", c_void_p)]


@dataclass(frozen=True)
class Codes4:
    """`Codes` of four bits: weight = values * group_scales * scales - group_mins * mins, in groups of 32 inputs.

    Attributes:
        values: uint8 [N, K], 0 to 15.
        group_scales, group_mins: uint8 [N, K / 32].
    """

    values: Tensor
    group_scales: Tensor
    group_mins: Tensor
    scales: Tensor
    mins: Tensor
    dtype = _CODES4
    storage = torch.uint8
    input_group = _FINE_GROUP

    @staticmethod
    def empty(size: tuple[int, int], scales: Tensor, mins: Tensor) -> Codes4:
        """Of a weight of `size` [N, K], to be filled."""
        groups = torch.empty(size[0], size[1] // _FINE_GROUP, dtype=torch.uint8)
        return Codes4(torch.empty(size, dtype=torch.uint8), groups, torch.empty_like(groups), scales, mins)

    @property
    def struct(self) -> _PlainCodes4:
        """The codes' addresses for the kernel, valid as long as this object."""
        return _PlainCodes4(*(part.data_ptr() for part in (self.values, self.group_scales, self.group_mins)))

    def pack(self, linear: int) -> None:
        library().inflight_ops_pack4(linear, ctypes.byref(self.struct), torch.get_num_threads())

    def unpack(self, linear: int) -> None:
        library().inflight_ops_unpack4(linear, ctypes.byref(self.struct), torch.get_num_threads())

    def affine(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `StoredCodes`."""
        scales = self.group_scales.float() * self.scales[:, None]
        return torch.zeros_like(scales), scales, self.group_mins.float() * self.mins[:, None]

    def dequantize(self) -> Tensor:
        _, scales, mins = self.affine()
        groups = self.values.view(*self.group_scales.shape, _FINE_GROUP).float()
        return (groups * scales[..., None] - mins[..., None]).view(self.values.shape)


def empty_codes(
    size: tuple[int, int], storage: torch.dtype, scales: Tensor | None, mins: Tensor | None, input_group: int
) -> Codes:
    """Codes with these attributes (see `Codes`) of a weight of `size` [N, K], to be filled from panels."""
    if scales is None:
        return Values(torch.empty(size, dtype=storage))
    if mins is None:
        return Codes8(torch.empty(size, dtype=storage), scales, input_group)
    return Codes4.empty(size, scales, mins)


class WeightFormat(Protocol):
    """One way to store a layer's weights.  `PackedWeight` packs the result of `encode`, whatever the format.

    Attributes:
        weighs_inputs: whether `encode` uses `importance`.
    """

    weighs_inputs: bool

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Codes:
        """The codes of weight [N, K] in float32, bfloat16 or float16, contiguous.

        Args:
            importance: float32 [K], of squared errors in the weights of each input; positive.  None: all are the same.
        """


class PlainFormat:
    """A `WeightFormat`: as the weights are."""

    weighs_inputs = False

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Codes:
        return Values(weight)


@dataclass(frozen=True)
class Int8Format:
    """A `WeightFormat`: eight bits, symmetric, with a scale per output feature.

    The kernel quantizes inputs to eight bits, too, with a scale per row and group (cpu_ops.h).  Weights stay as they
    are unless K is a multiple of 4.

    Attributes:
        input_group: 64 or 32.
    """

    input_group: int
    weighs_inputs = False

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Codes:
        if weight.shape[1] % 4:
            return Values(weight)
        values, scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(len(weight))
        for start in range(0, len(weight), _ROWS):
            part = weight[start : start + _ROWS].float()
            scale = part.abs().amax(1) / 127
            scales[start : start + _ROWS] = scale
            values[start : start + _ROWS] = (part / scale.clamp_min(1e-30)[:, None]).round_().add_(_ZERO)
        return Codes8(values, scales, self.input_group)


class Int6Format:
    """A `WeightFormat`: six bits, symmetric, with a scale per output feature and group of 64 inputs.

    For a head, between eight bits and four.  Weights have eight bits unless K is a multiple of 64.
    """

    weighs_inputs = False

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Codes:
        num_outputs, num_inputs = weight.shape
        if num_inputs % _GROUP:
            return INT8.encode(weight)
        values = torch.empty(weight.shape, dtype=torch.uint8)
        scales = torch.empty(num_outputs, num_inputs // _GROUP)
        for start in range(0, num_outputs, _ROWS):
            part = weight[start : start + _ROWS].float().unflatten(1, (-1, _GROUP))
            scale = part.abs().amax(2) / _LARGEST6
            scales[start : start + _ROWS] = scale = _as_half(scale)
            codes = (part / scale.clamp_min(1e-30)[..., None]).round_().clamp_(-_ZERO6, _LARGEST6)
            values[start : start + _ROWS] = codes.add_(_ZERO6).flatten(1)
        return StoredCodes(values, 6, _ZERO6, scales.half() if torch.equal(scales.half().float(), scales) else scales)


def _as_half(scales: Tensor) -> Tensor:
    """Rounded to float16, except where some are too large or too small for it."""
    rounded = scales.half().float()
    return rounded if bool((rounded.isfinite() & ((rounded >= _SMALLEST_HALF) | (scales == 0))).all()) else scales


class Int4Format:
    """A `WeightFormat`: four bits, with a scale and a minimum per output feature and group of 32 inputs, a byte each.

    Chosen by least squares (cpu_choose_codes.h).  Weights have eight bits unless K is a multiple of 32.
    """

    weighs_inputs = True

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Codes:
        if weight.shape[1] % _FINE_GROUP:
            return INT8.encode(weight)
        size = len(weight), weight.shape[1]
        importance = torch.ones(size[1]) if importance is None else importance.contiguous()
        codes = Codes4.empty(size, torch.empty(size[0]), torch.empty(size[0]))
        library().inflight_ops_choose_codes(
            weight.data_ptr(),
            DTYPE_CODES[weight.dtype],
            *size,
            importance.data_ptr(),
            ctypes.byref(codes.struct),
            codes.scales.data_ptr(),
            codes.mins.data_ptr(),
            torch.get_num_threads(),
        )
        return codes


PLAIN = PlainFormat()
INT8 = Int8Format(_GROUP)
FINE_INT8 = Int8Format(_FINE_GROUP)
INT6 = Int6Format()
INT4 = Int4Format()


@dataclass(frozen=True)
class Formats:
    """Of a model: its layers' and that of its head, where an error costs the most."""

    layers: WeightFormat
    head: WeightFormat


UNCHANGED = Formats(PLAIN, PLAIN)
