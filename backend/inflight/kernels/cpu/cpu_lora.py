"""Adapters in the format of the native decoder: `cpu_lora.h`, packed by `cpu_lora_pack.cpp`.

A *projection* is a merged and packed weight of a layer: query, key and value; output; gate and up; down.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.kernels.cpu.cpu_linear import LinearStruct, PackedWeight
from inflight.kernels.cpu.library import DTYPE_CODES, allocate, library

__all__ = ["LowRank", "NotFinite", "PackedAdapter"]

_HALF = 16  # features: kPanel / 2


class _HalfPanel(ctypes.Structure):
    """`HalfPanel` of cpu_ops.h."""

    _fields_ = [("offset", c_int64), ("first", c_int32), ("depth", c_int32)]


class _Expand(ctypes.Structure):
    """`Expand` of cpu_ops.h."""

    _fields_ = [("values", c_void_p), ("halves", POINTER(_HalfPanel)), ("dtype", c_int32)]


class _LowRank(ctypes.Structure):
    """`LowRank` of cpu_lora.h."""

    _fields_ = [("shrink", LinearStruct), ("parts", POINTER(_Expand))]


class _Adapter(ctypes.Structure):
    """`Adapter` of cpu_lora.h."""

    _fields_ = [("projections", POINTER(_LowRank))]


class _StoredPair(ctypes.Structure):
    """`StoredPair` of cpu_lora_pack.cpp."""

    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("start", c_int64),
        ("features", c_int64),
        ("rank", c_int32),
        ("a_dtype", c_int32),
        ("b_dtype", c_int32),
        ("scale", c_float),
    ]


@dataclass(frozen=True)
class LowRank:
    """The matrices of one linear layer, contiguous, in float32, bfloat16 or float16.

    Attributes:
        start: the layer's first feature among those of its projection.
        a: [rank, in_features].
        b: [features, rank].
        scale: of b, multiplied in float32.
    """

    start: int
    a: Tensor
    b: Tensor
    scale: float


class NotFinite(NamedTuple):
    """A matrix with NaN, infinity, or a number that the adapter's dtype cannot hold.

    Attributes:
        layer: index of its `LowRank`.
    """

    layer: int
    is_b: bool


class PackedAdapter:
    """An adapter's matrices in the order in which the kernel reads them.

    Args:
        num_projections: of all layers; each that is not filled stays as it is.
        dtype: of the model's inputs.

    Attributes:
        inner: the largest sum of ranks in a projection.
        nbytes: of the matrices.
        address: of the description that the kernel reads.
    """

    def __init__(self, num_projections: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parts: list[object] = []  # that the structs have addresses of
        self.inner = self.nbytes = 0
        self._projections = (_LowRank * num_projections)()
        self._struct = _Adapter(self._projections)
        self.address = ctypes.addressof(self._struct)

    def fill(self, projection: int, weight: PackedWeight, layers: Sequence[LowRank]) -> NotFinite | None:
        """Pack what the adapter adds to a projection, on this thread alone, mostly without Python's lock.

        Args:
            projection: its place in the order of `Projection` in cpu_lora.h.
            weight: of the projection.
        """
        pairs = (_StoredPair * len(layers))(*map(_stored, layers))
        inner, library_ = sum(len(layer.a) for layer in layers), library()
        shrink = LinearStruct(in_features=weight.in_features, out_features=inner, dtype=DTYPE_CODES[self._dtype])
        size = library_.inflight_ops_packed_bytes(ctypes.addressof(shrink)) // self._dtype.itemsize
        panels = allocate(size, dtype=self._dtype)
        shrink.panels = panels.data_ptr()
        bad = library_.inflight_lora_shrink(ctypes.addressof(shrink), pairs, len(layers))
        if bad:
            return NotFinite(bad - 1, False)
        weights: list[PackedWeight] = []
        further: PackedWeight | None = weight
        while further is not None:
            weights.append(further)
            further = further.further
        expands = (_Expand * len(weights))()
        start = 0
        for expand, part in zip(expands, weights):
            bad = self._expand(expand, part, start, pairs)
            if bad:
                return NotFinite(bad - 1, True)
            start += part.out_features
        self.inner = max(self.inner, inner)
        self.nbytes += panels.nbytes
        self._parts += [panels, expands]
        struct = self._projections[projection]
        struct.shrink, struct.parts = shrink, expands
        return None

    def _expand(self, struct: _Expand, part: PackedWeight, start: int, pairs: ctypes.Array[_StoredPair]) -> int:
        """The half panels of one `Linear`, whose features begin at `start`; see `inflight_lora_expand`."""
        panels = -(-part.num_results // (_HALF if part.struct.gated else 2 * _HALF))
        halves = (_HalfPanel * (2 * panels))()
        place = part.address, start, pairs, len(pairs)
        values = allocate(library().inflight_lora_halves(*place, halves), dtype=self._dtype)
        struct.values, struct.halves, struct.dtype = values.data_ptr(), halves, DTYPE_CODES[self._dtype]
        self.nbytes += values.nbytes
        self._parts += [values, halves]
        bad: int = library().inflight_lora_expand(*place, ctypes.addressof(struct))
        return bad


def _stored(layer: LowRank) -> _StoredPair:
    a, b = layer.a, layer.b
    return _StoredPair(
        a.data_ptr(), b.data_ptr(), layer.start, *b.shape, DTYPE_CODES[a.dtype], DTYPE_CODES[b.dtype], layer.scale
    )
