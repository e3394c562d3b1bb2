"""Codes of a checkpoint as the CPU kernels keep them, and what codes of every kind have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from inflight.kernels.cpu.library import library

__all__ = ["LAYOUT", "StoredCodes", "dequantized", "joined", "outputs_of"]

LAYOUT = [(name, c_int32) for name in ("bits", "group", "span", "zero", "scale", "minimum")]  # StoredCodes of cpu_ops.h
_STORED = 6  # its dtype
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3, torch.int8: 4}
_MINIMUMS = {None: 0, torch.int8: 1, torch.float16: 2, torch.uint8: 3}
_INPUT_GROUPS = (64, 32, 16)  # kInputGroup, kFineGroup and kFinestGroup of cpu_ops.h
_BITS = (4, 6, 8)

_AnyCodes = TypeVar("_AnyCodes")


class _PlainStored(ctypes.Structure):
    """`PlainStored` of cpu_ops.h."""

    _fields_ = [(name, c_void_p) for name in ("codes", "scales", "minimums", "units", "minimum_units")]


@dataclass(frozen=True)
class StoredCodes:
    """`Codes` of a checkpoint: weight = (values - zero) * scale - minimum, with a scale for each G inputs.

    Attributes:
        values: uint8 [N, K], from 0 to 2**bits - 1, in the order in which groups are contiguous.
        bits: 4, 6 or 8.
        zero: of all codes.
        group_scales: [N, K / G]: float16, bfloat16 or float32, the scales; int8 or uint8, times `units`.
        minimums: [N, K / G]: int8, times the scale; float16; uint8, times `minimum_units`; None: 0.
        units, minimum_units: float16 [N, K / span], or None.
        order: int32 [K]: values[:, k] belongs to input order[k]; None if that is k.
    """

    values: Tensor
    bits: int
    zero: int
    group_scales: Tensor
    minimums: Tensor | None = None
    units: Tensor | None = None
    minimum_units: Tensor | None = None
    order: Tensor | None = None
    scales = mins = None
    dtype = _STORED
    storage = torch.uint8

    @staticmethod
    def fits(num_inputs: int, group: int, bits: int) -> bool:
        """Whether the kernel multiplies with such codes."""
        return bits in _BITS and num_inputs % group == 0 and group % _INPUT_GROUPS[-1] == 0

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.group_scales.shape[1]

    @property
    def span(self) -> int:
        num_inputs = self.values.shape[1]
        return num_inputs if self.units is None else num_inputs // self.units.shape[1]

    @property
    def input_group(self) -> int:
        return next(size for size in _INPUT_GROUPS if self.group % size == 0)

    @property
    def layout(self) -> dict[str, int]:
        """The fields of LAYOUT."""
        kinds = _SCALES[self.group_scales.dtype], _MINIMUMS[None if self.minimums is None else self.minimums.dtype]
        return dict(zip((name for name, _ in LAYOUT), (self.bits, self.group, self.span, self.zero, *kinds)))

    @staticmethod
    def empty(size: tuple[int, int], layout: Any, order: Tensor | None) -> StoredCodes:
        """Of a weight of `size` [N, K], to be filled; `layout` has the attributes of LAYOUT."""

        def numbers(kinds: dict[Any, int], kind: int, per: int) -> Tensor | None:
            dtype = next(dtype for dtype, number in kinds.items() if number == kind)
            return None if dtype is None else torch.empty(size[0], size[1] // per, dtype=dtype)

        units = [torch.empty(size[0], size[1] // layout.span, dtype=torch.float16) for _ in range(2)]
        scales = numbers(_SCALES, layout.scale, layout.group)
        minimums = numbers(_MINIMUMS, layout.minimum, layout.group)
        assert scales is not None
        return StoredCodes(
            torch.empty(size, dtype=torch.uint8),
            layout.bits,
            layout.zero,
            scales,
            minimums,
            None if scales.is_floating_point() else units[0],
            units[1] if minimums is not None and minimums.dtype == torch.uint8 else None,
            order,
        )

    @property
    def struct(self) -> _PlainStored:
        """The codes' addresses for the kernel, valid as long as this object."""
        parts = (self.values, self.group_scales, self.minimums, self.units, self.minimum_units)
        return _PlainStored(*(None if part is None else part.data_ptr() for part in parts))

    def pack(self, linear: int) -> None:
        library().inflight_ops_pack_stored(linear, ctypes.byref(self.struct), torch.get_num_threads())

    def unpack(self, linear: int) -> None:
        library().inflight_ops_unpack_stored(linear, ctypes.byref(self.struct), torch.get_num_threads())

    def affine(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """float32 [N, G] each: weight = (values - zero) * scale - minimum."""
        scales, zero = _times(self.group_scales, self.units), torch.full(self.group_scales.shape, float(self.zero))
        if self.minimums is None:
            return zero, scales, None
        if self.minimums.dtype == torch.int8:
            return zero + self.minimums, scales, None
        return zero, scales, _times(self.minimums, self.minimum_units)

    def dequantize(self) -> Tensor:
        """In the order of operations of llama.cpp, bit for bit; where there are zero points, each is rounded once."""
        zero, scales, minimums = self.affine()
        wide = self.values.view(*self.group_scales.shape, self.group).float()
        wide.sub_(zero[..., None]).mul_(scales[..., None])
        if minimums is not None:
            wide.sub_(minimums[..., None])
        out = wide.flatten(1)
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order.long(), out)


def _times(numbers: Tensor, units: Tensor | None) -> Tensor:
    """float32 [N, G]"""
    if units is None:
        return numbers.float()
    return (numbers.view(*units.shape, -1).float() * units[..., None].float()).flatten(1)


def _of_outputs(codes: Any) -> dict[str, Tensor]:
    """The tensors that have a row per output."""
    found = {field.name: getattr(codes, field.name) for field in fields(codes) if field.name != "order"}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def outputs_of(codes: _AnyCodes, start: int, stop: int) -> _AnyCodes:
    """The codes of the outputs from `start` up to `stop`."""
    return replace(codes, **{name: part[start:stop] for name, part in _of_outputs(codes).items()})  # type: ignore[type-var]


def joined(parts: Sequence[_AnyCodes]) -> _AnyCodes:
    """The codes of all outputs; those of `parts` are of one kind, see `PackedWeight.joins`."""
    if len(parts) == 1:
        return parts[0]
    names = _of_outputs(parts[0])
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})  # type: ignore[type-var]


def dequantized(codes: Any) -> Tensor:
    """The numbers of codes of any kind, up to their last bit: much faster than `dequantize`."""
    if not hasattr(codes, "affine"):
        return codes.dequantize()
    zeros, scales, minimums = codes.affine()
    zeros, scales = zeros.contiguous(), scales.contiguous()
    minimums = None if minimums is None else minimums.contiguous()
    values, out = codes.values.contiguous(), torch.empty(codes.values.shape)
    library().inflight_ops_dequantize(
        values.data_ptr(),
        scales.numel(),
        out.numel() // scales.numel(),
        zeros.data_ptr(),
        scales.data_ptr(),
        None if minimums is None else minimums.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    order = getattr(codes, "order", None)
    return out if order is None else torch.empty_like(out).index_copy_(1, order.long(), out)
