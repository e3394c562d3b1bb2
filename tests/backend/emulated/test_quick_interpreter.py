"""The quick interpreter computes what the shipped one does, also where what a program does depends on its data."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from quick_interpreter import quick_interpreter

from inflight.kernels.gpu.launch import interpreted

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value"),
]


@triton.jit
def _difference(x, y):
    return x - y


@triton.jit
def _divided_by(x, ZERO: tl.constexpr):
    return x / ZERO


@triton.jit
def _sign_of(value):
    if value < 0:
        return -1.0
    return 1.0


@triton.jit
def _same(x):
    return x


@triton.jit
def kernel(numbers, counts, out, WIDTH: tl.constexpr):
    """Out: [programs, 8, WIDTH]."""
    row, lanes = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(numbers + row * WIDTH + lanes)
    count = tl.load(counts + row)
    places = out + row * 8 * WIDTH + lanes
    tl.store(places, _difference(x, x))
    tl.store(places + WIDTH, _difference(x, x + 1.0))
    tl.store(places + 2 * WIDTH, _divided_by(x, 0.0))
    tl.store(places + 3 * WIDTH, _divided_by(x, -0.0))
    total = tl.zeros([WIDTH], tl.float32)
    for step in tl.range(0, count):
        total += x * step
    for step in range(count):
        total += step
    tl.store(places + 4 * WIDTH, total)
    tl.store(places + 5 * WIDTH, _same(x) * _sign_of(tl.load(numbers + row * WIDTH)))
    largest = tl.max(tl.where(x == tl.min(x, 0), float("nan"), x), 0)
    tl.store(places + 6 * WIDTH, largest + tl.cumsum(x, 0))
    if count > 2:
        x = tl.sum(x, 0) + tl.zeros([WIDTH], tl.float32)
    tl.store(places + 7 * WIDTH, x)


def computed(quickly: bool, numbers: Tensor, counts: Tensor) -> Tensor:
    out = torch.full((len(counts), 8, numbers.shape[1]), torch.nan)
    with quick_interpreter() if quickly else contextlib.nullcontext():
        kernel[(len(counts),)](numbers, counts, out, WIDTH=numbers.shape[1])
    return out


def test_programs_with_other_data_take_other_branches() -> None:
    torch.manual_seed(0)
    for width in (4, 16, 4):
        numbers, counts = torch.randn(6, width), torch.tensor([3, 0, 1, 5, 3, 2], dtype=torch.int32)
        expected = computed(False, numbers, counts)
        assert torch.equal(computed(True, numbers, counts).view(torch.int32), expected.view(torch.int32))
        assert not torch.equal(expected[:, 2], expected[:, 3])


def test_the_language_is_as_it_was_afterwards() -> None:
    before = tl.load, tl.tensor.__add__, tl.range
    with quick_interpreter():
        numbers, counts = torch.randn(1, 4), torch.ones(1, dtype=torch.int32)
        kernel[(1,)](numbers, counts, torch.empty(1, 8, 4), WIDTH=4)
        assert tl.load is not before[0]
    assert before == (tl.load, tl.tensor.__add__, tl.range)
