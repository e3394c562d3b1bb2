"""Adapters in the format of the native decoder: `cpu_lora.h`.

A *projection* is a merged and packed weight of a layer: query, key and value; output; gate and up; down.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kernels.cpu.cpu_linear import LinearStruct, PackedWeight
from inflight.kernels.cpu.library import DTYPE_CODES, allocate

__all__ = ["LowRank", "PackedAdapter"]

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


@dataclass(frozen=True)
class LowRank:
    """The matrices of one linear layer; all are of one dtype, and the scale is part of `b`.

    Attributes:
        start: the layer's first feature among those of its projection.
        a: [rank, in_features].
        b: [features, rank].
    """

    start: int
    a: Tensor
    b: Tensor


class PackedAdapter:
    """An adapter's matrices in the order in which the kernel reads them.

    Args:
        projections: of all layers, in the order of `Projection` in cpu_lora.h: the weight, and what the adapter adds.

    Attributes:
        inner: the largest sum of ranks in a projection.
        nbytes: of the matrices.
        address: of the description that the kernel reads.
    """

    def __init__(self, projections: Sequence[tuple[PackedWeight, Sequence[LowRank]]]) -> None:
        self._parts: list[object] = []  # that the structs have addresses of
        self.inner = self.nbytes = 0
        structs = (_LowRank * len(projections))()
        for struct, (weight, pairs) in zip(structs, projections):
            if pairs:
                self._fill(struct, weight, pairs)
        self._struct = _Adapter(structs)
        self.address = ctypes.addressof(self._struct)

    def _fill(self, struct: _LowRank, weight: PackedWeight, pairs: Sequence[LowRank]) -> None:
        shrink = PackedWeight([torch.cat([pair.a for pair in pairs])])
        self.inner = max(self.inner, shrink.out_features)
        self.nbytes += shrink.panels.nbytes
        struct.shrink = shrink.struct
        weights: list[PackedWeight] = []
        further: PackedWeight | None = weight
        while further is not None:
            weights.append(further)
            further = further.further
        dense = _block_diagonal(pairs, sum(part.out_features for part in weights))
        ranges = _ranges(pairs, len(dense))
        structs = (_Expand * len(weights))()
        start = 0
        for expand, part in zip(structs, weights):
            end = start + part.out_features
            self._expand(expand, dense[start:end], ranges[start:end], bool(part.struct.gated))
            start = end
        struct.parts = structs
        self._parts += [shrink, structs]

    def _expand(self, struct: _Expand, dense: Tensor, ranges: Tensor, gated: bool) -> None:
        """The half panels of one `Linear`: `dense` [features, inner]; `ranges` int64 [features, 2], see `_ranges`."""
        features = _features(len(dense), gated)
        dense = torch.cat([dense, dense.new_zeros(1, dense.shape[1])])  # of the padding
        ranges = torch.cat([ranges, torch.tensor([[dense.shape[1], 0]])])
        of_half = ranges[features]
        first, end = of_half[..., 0].amin(1), of_half[..., 1].amax(1)
        halves = (_HalfPanel * len(features))()
        blocks: list[Tensor] = []
        offset = 0
        for bounds in sorted(set(zip(first.tolist(), end.tolist()))):
            low, high = bounds
            if low >= high:
                continue
            chosen = ((first == low) & (end == high)).nonzero()[:, 0]
            blocks.append(dense[features[chosen]][..., low:high].transpose(1, 2).reshape(-1))
            size = _HALF * (high - low)
            for place, index in enumerate(chosen.tolist()):
                halves[index] = _HalfPanel(offset + place * size, low, high - low)
            offset += len(chosen) * size
        values = allocate(offset, dtype=dense.dtype)
        if blocks:
            torch.cat(blocks, out=values)
        struct.values, struct.halves, struct.dtype = values.data_ptr(), halves, DTYPE_CODES[dense.dtype]
        self.nbytes += values.nbytes
        self._parts += [values, halves]


def _block_diagonal(pairs: Sequence[LowRank], num_features: int) -> Tensor:
    """B of a projection, [num_features, sum of ranks]."""
    dense = pairs[0].b.new_zeros(num_features, sum(pair.b.shape[1] for pair in pairs))
    column = 0
    for pair in pairs:
        features, rank = pair.b.shape
        dense[pair.start : pair.start + features, column : column + rank] = pair.b
        column += rank
    return dense


def _ranges(pairs: Sequence[LowRank], num_features: int) -> Tensor:
    """First column of B that a feature uses, and the one behind its last; int64 [num_features, 2]."""
    inner = sum(pair.b.shape[1] for pair in pairs)
    ranges = torch.tensor([[inner, 0]]).repeat(num_features, 1)
    column = 0
    for pair in pairs:
        features, rank = pair.b.shape
        ranges[pair.start : pair.start + features] = torch.tensor([column, column + rank])
        column += rank
    return ranges


def _features(num_features: int, gated: bool) -> Tensor:
    """The feature of each column of each half panel, int64 [halves, kPanel / 2]; `num_features` in the padding.

    See `Linear::feature_of` of cpu_ops.h: the halves of a gated panel are of the gate and of its operand.
    """
    results = num_features // 2 if gated else num_features
    width = _HALF if gated else 2 * _HALF
    panels = -(-results // width)
    column = torch.arange(panels * width)
    column[results:] = num_features
    if not gated:
        return column.view(-1, _HALF)
    operand = torch.where(column < num_features, column + results, column)
    return torch.stack([column.view(-1, _HALF), operand.view(-1, _HALF)], 1).view(-1, _HALF)
