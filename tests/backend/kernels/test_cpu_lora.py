"""Adapters packed natively: the numbers of torch's conversions, each in its place."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.cpu_lora import LowRank, NotFinite, PackedAdapter

INPUTS = 22
DTYPES = torch.float32, torch.bfloat16, torch.float16
# Outputs of the layers of a projection, and whether they are a gate and its operand.
PROJECTIONS = [([48, 16, 16], False), ([40, 7, 9], False), ([33], False), ([40, 40], True), ([64, 64], True)]


def layers_of(sizes: list[int], stored: torch.dtype, missing: int | None = None) -> list[LowRank]:
    generator = torch.Generator().manual_seed(sum(sizes))
    found, start = [], 0
    for index, size in enumerate(sizes):
        rank = 3 + 2 * index
        a, b = (torch.randn(shape, generator=generator).to(stored) for shape in ((rank, INPUTS), (size, rank)))
        if index != missing:
            found.append(LowRank(start, a, b, 1.7 - index))
        start += size
    return found


def unpacked(adapter: PackedAdapter, weight: PackedWeight, inner: int, dtype: torch.dtype) -> Tensor:
    """B, [features, inner], read as the kernel does."""
    expand = adapter._projections[0].parts[0]
    halves = 2 * -(-weight.num_results // (16 if weight.struct.gated else 32))
    size = max(expand.halves[i].offset + 16 * expand.halves[i].depth for i in range(halves))
    raw = bytearray(ctypes.string_at(expand.values, size * dtype.itemsize))
    values = torch.frombuffer(raw, dtype=dtype)
    dense = torch.zeros(weight.out_features, inner, dtype=dtype)
    for index in range(halves):
        half = expand.halves[index]
        block = values[half.offset :][: 16 * half.depth].view(half.depth, 16)
        for n in range(16):
            if weight.struct.gated:
                result = index // 2 * 16 + n
                feature = result + index % 2 * weight.num_results
            else:
                result = feature = index * 16 + n
            if result < weight.num_results:
                dense[feature, half.first : half.first + half.depth] = block[:, n]
            else:
                assert not block[:, n].any()
    return dense


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_what_is_packed(dtype: torch.dtype, stored: torch.dtype) -> None:
    for sizes, gated in PROJECTIONS:
        weight = PackedWeight([torch.zeros(size, INPUTS, dtype=dtype) for size in sizes], gated=gated)
        for missing in (None, 0) if len(sizes) > 1 else (None,):
            layers = layers_of(sizes, stored, missing)
            adapter = PackedAdapter(1, dtype)
            assert adapter.fill(0, weight, layers) is None
            inner = sum(len(layer.a) for layer in layers)
            expected, column = torch.zeros(sum(sizes), inner, dtype=dtype), 0
            for layer in layers:
                place = expected[layer.start : layer.start + len(layer.b)]
                place[:, column : column + len(layer.a)] = (layer.b.float() * layer.scale).to(dtype)
                column += len(layer.a)
            assert torch.equal(unpacked(adapter, weight, inner, dtype), expected), (sizes, missing)
            a = PackedWeight([torch.cat([layer.a for layer in layers]).to(dtype)])
            found = ctypes.string_at(adapter._projections[0].shrink.panels, a.panels.nbytes)
            assert found == bytes(a.panels.view(torch.uint8).numpy()), (sizes, missing)
            assert adapter.inner == inner


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    sizes = [40, 8]
    weight = PackedWeight([torch.zeros(size, INPUTS, dtype=dtype) for size in sizes])
    for index in range(2):
        for is_b in (False, True):
            layers = layers_of(sizes, torch.float32)
            matrix = layers[index].b if is_b else layers[index].a
            matrix[-1, -1] = value
            adapter = PackedAdapter(1, dtype)
            assert adapter.fill(0, weight, layers) == NotFinite(index, is_b)


def test_a_number_that_the_dtype_cannot_hold_is_not_finite() -> None:
    weight = PackedWeight([torch.zeros(40, INPUTS, dtype=torch.float16)])
    (layer,) = layers_of([40], torch.float32)
    layer.b[3, 1] = 60000.0  # times 1.7
    assert PackedAdapter(1, torch.float16).fill(0, weight, [layer]) == NotFinite(0, True)
    layer.b[3, 1] = 30000.0
    assert PackedAdapter(1, torch.float16).fill(0, weight, [layer]) is None
