"""Codes of a checkpoint in panels: nothing is lost, and products are those of the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from inflight.kernels.cpu.cpu_linear import PackedWeight, linear
from inflight.kernels.cpu.library import unavailable
from inflight.kernels.cpu.stored_codes import StoredCodes, dequantized, joined, outputs_of

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

# bits, zero, dtypes of scales and minimums, whether they have units; each is a format of some checkpoint.
KINDS: dict[str, tuple[int, int, torch.dtype, torch.dtype | None]] = {
    "gptq": (4, 8, torch.float16, torch.int8),
    "symmetric": (4, 8, torch.bfloat16, None),
    "eight bits": (8, 128, torch.float32, torch.int8),
    "Q4_1": (4, 0, torch.float16, torch.float16),
    "Q8_0": (8, 128, torch.float16, None),
    "Q4_K": (4, 0, torch.uint8, torch.uint8),
    "Q5_K": (6, 0, torch.uint8, torch.uint8),
    "Q6_K": (6, 32, torch.int8, None),
}
in_every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, outputs: int, inputs: int, group: int, seed: int = 0, has_order: bool = False) -> StoredCodes:
    """Random codes of all values, with a span of two groups if they have one."""
    bits, zero, scales, minimums = KINDS[kind]
    rng = np.random.default_rng(seed)

    def numbers(dtype: torch.dtype | None, per: int) -> Tensor | None:
        if dtype is None:
            return None
        size = outputs, inputs // per
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            low, high = (-zero, 2**bits - zero) if dtype == torch.int8 == minimums else (limits.min, limits.max + 1)
            return torch.from_numpy(rng.integers(low, high, size)).to(dtype)
        return torch.from_numpy(rng.uniform(-0.02, 0.02, size)).to(dtype)

    has_units = not scales.is_floating_point
    found = StoredCodes(
        torch.from_numpy(rng.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8)),
        bits,
        zero,
        numbers(scales, group),  # type: ignore[arg-type]
        numbers(minimums, group),
        numbers(torch.float16, 2 * group) if has_units else None,
        numbers(torch.float16, 2 * group) if minimums == torch.uint8 else None,
        torch.from_numpy(rng.permutation(inputs)).to(torch.int32) if has_order else None,
    )
    assert found.group == group
    return found


def numbers_of(codes: StoredCodes) -> np.ndarray:
    """float64 [N, K], from the description of the format alone."""

    def wide(numbers: Tensor, per: int) -> np.ndarray:
        return numbers.to(torch.float64).numpy().repeat(per, 1)

    inputs = codes.values.shape[1]
    span = inputs if codes.units is None else inputs // codes.units.shape[1]
    scales = wide(codes.group_scales, codes.group)
    if codes.units is not None:
        scales = scales * wide(codes.units, span)
    out = (codes.values.numpy().astype(np.float64) - codes.zero) * scales
    if codes.minimums is not None:
        minimums = wide(codes.minimums, codes.group)
        if codes.minimums.dtype == torch.int8:
            minimums = minimums * scales
        if codes.minimum_units is not None:
            minimums = minimums * wide(codes.minimum_units, span)
        out = out - minimums
    if codes.order is not None:
        plain = np.empty_like(out)
        plain[:, codes.order.numpy()] = out
        out = plain
    return out


def packed_of(codes: StoredCodes, bias: Tensor | None = None, gated: bool = False) -> PackedWeight:
    outputs, inputs = codes.values.shape
    return PackedWeight.of_codes(codes, torch.float32, (inputs, [outputs]), [bias], gated)


def quantized(rows: Tensor, codes: StoredCodes) -> Tensor:
    """float64: the inputs as the kernel rounds them, a group at a time in the order of the codes."""
    order = torch.arange(rows.shape[1]) if codes.order is None else codes.order.long()
    groups = rows[:, order].view(len(rows), -1, codes.input_group)
    scale = (groups.abs().amax(2, keepdim=True) / 127).double()
    rounded = ((groups.double() / scale).round() * scale).nan_to_num().flatten(1)
    return torch.empty_like(rounded).index_copy_(1, order, rounded)


def some_inputs(rows: int, size: int, seed: int = 1) -> Tensor:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    x[:, 5] *= 10
    return x


@in_every_kind
@pytest.mark.parametrize("group", [16, 32, 64, 128, 96])
def test_products_are_those_of_the_numbers(isa: str, kind: str, group: int) -> None:
    for gated in (False, True):
        codes = made(kind, 150, 2 * group, group, has_order=group != 32)
        bias = torch.randn(150, generator=torch.Generator().manual_seed(2))
        weight = torch.from_numpy(numbers_of(codes))
        for rows in (1, 5, 40):
            x = some_inputs(rows, 2 * group, rows)
            found = linear(x, packed_of(codes, bias, gated)).double()
            expected = F.linear(quantized(x, codes), weight, bias.double())
            if gated:
                expected = F.silu(expected[:, :75]) * expected[:, 75:]
            assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@given(case=st.data())
@settings(max_examples=60, deadline=None)
def test_packing_loses_nothing(case: st.DataObject) -> None:
    kind, group = case.draw(st.sampled_from(sorted(KINDS))), 16 * case.draw(st.integers(1, 9))
    outputs, inputs = 2 * case.draw(st.integers(1, 40)), 2 * group * case.draw(st.integers(1, 2))
    codes = made(kind, outputs, inputs, group, case.draw(st.integers(0, 2**16)), case.draw(st.booleans()))
    found: Any = packed_of(codes, gated=case.draw(st.booleans())).codes()
    assert (found.bits, found.zero, found.group, found.span) == (codes.bits, codes.zero, codes.group, codes.span)
    for name in ("values", "group_scales", "minimums", "units", "minimum_units", "order"):
        expected = getattr(codes, name)
        assert expected is getattr(found, name) is None or torch.equal(getattr(found, name), expected), name
    expected_numbers = numbers_of(codes)
    for plain in (found.dequantize(), dequantized(found)):
        assert np.abs(plain.numpy() - expected_numbers).max() <= 3e-7 * np.abs(expected_numbers).max()


@in_every_kind
def test_a_row_is_bitwise_independent_of_other_rows(isa: str, kind: str) -> None:
    packed = packed_of(made(kind, 100, 128, 64, has_order=True))
    x = some_inputs(230, 128)
    whole = linear(x, packed)
    for first, last in [(9, 10), (0, 3), (150, 167), (95, 229)]:
        assert torch.equal(linear(x[first:last], packed), whole[first:last])
    torch.set_num_threads(2)
    assert torch.equal(linear(x, packed), whole)


@in_every_kind
def test_a_row_that_is_not_finite_stays_so(isa: str, kind: str) -> None:
    packed = packed_of(made(kind, 75, 128, 32))
    x = some_inputs(3, 128)
    expected = linear(x, packed)
    x[1, 70] = torch.nan
    found = linear(x, packed)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@in_every_kind
def test_outputs_are_split_and_joined(kind: str) -> None:
    codes = made(kind, 50, 128, 32, has_order=True)
    parts = [outputs_of(codes, 0, 20), outputs_of(codes, 20, 50)]
    assert packed_of(parts[0]).joins(packed_of(parts[1]))
    assert torch.equal(joined(parts).dequantize(), codes.dequantize())


def test_codes_of_other_kinds_groups_or_orders_are_not_joined() -> None:
    ordered = [packed_of(made("gptq", 8, 128, 64, seed, has_order=True)) for seed in (0, 0, 1)]
    others = [packed_of(made(*case)) for case in [("gptq", 8, 128, 32), ("Q4_1", 8, 128, 64), ("gptq", 8, 256, 64)]]
    codes = packed_of(made("gptq", 8, 128, 64))
    assert not any(codes.joins(other) or other.joins(codes) for other in [*others, *ordered])
    assert ordered[0].joins(ordered[1])
    assert not ordered[0].joins(ordered[2])
    assert not codes.joins(packed_of(made("symmetric", 8, 128, 64)))


def test_panels_take_what_the_checkpoint_takes() -> None:
    """Bits per weight: of the codes, and of the scales."""
    found = {kind: packed_of(made(kind, 64, 512, 256 if kind == "gptq" else 32)).panels.nbytes for kind in KINDS}
    bits = {kind: 8 * size / (64 * 512) for kind, size in found.items()}
    assert bits["symmetric"] == 4 + 16 / 32
    assert bits["gptq"] == 4 + 24 / 256
    assert bits["Q4_K"] == 4 + 16 / 32 + 32 / 64
    assert bits["Q8_0"] == 8 + 16 / 32
    assert bits["Q6_K"] == 6 + 8 / 32 + 16 / 64
