"""Products with packed weights agree with torch's, weights are restored exactly, rows are independent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from inflight.kernels.cpu.cpu_linear import PackedWeight, linear
from inflight.kernels.cpu.library import unavailable
from inflight.kernels.cpu.weight_format import FINE_INT8, INT4, INT8, Codes4, Int8Format, Values, WeightFormat

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# in_features, out_features: whole panels, part of a panel, and odd sizes.
SIZES = [(64, 96), (32, 16), (38, 7), (130, 75), (16, 32)]
ROWS = [1, 2, 3, 5, 12, 13, 31, 100]
FORMATS = {"int8": INT8, "fine int8": FINE_INT8, "int4": INT4}
in_every_format = pytest.mark.parametrize("stored_as", FORMATS.values(), ids=FORMATS)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(result: Tensor, expected: Tensor, roundings: int = 8) -> None:
    """Up to a few roundings of the result's dtype; `expected` is float64."""
    assert result.shape == expected.shape
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error < roundings * torch.finfo(result.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products_agree_with_torchs(isa: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    weight, bias = random(size[1], size[0], dtype=dtype), random(size[1], dtype=dtype, seed=1)
    plain, biased = PackedWeight([weight]), PackedWeight([weight], [bias])
    for rows in ROWS:
        x = random(rows, size[0], dtype=dtype, seed=rows)
        assert_close(linear(x, plain), F.linear(x.double(), weight.double()))
        assert_close(linear(x, biased), F.linear(x.double(), weight.double(), bias.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 40, 7])
def test_a_gated_layer_multiplies_by_silu_of_the_gate(isa: str, dtype: torch.dtype, width: int) -> None:
    gate, up = random(width, 24, dtype=dtype), random(width, 24, dtype=dtype, seed=1)
    biases = [random(width, dtype=dtype, seed=2), None]
    packed = PackedWeight([gate, up], biases, gated=True)
    x = 3 * random(9, 24, dtype=dtype, seed=3)
    expected = F.silu(F.linear(x.double(), gate.double(), biases[0].double())) * F.linear(x.double(), up.double())
    assert_close(linear(x, packed), expected)


def test_several_weights_form_one_layer() -> None:
    parts = [random(n, 20, dtype=torch.float32, seed=n) for n in (5, 40, 3)]
    x = random(2, 3, 20, dtype=torch.float32)
    result = linear(x, PackedWeight(parts, [None, random(40, dtype=torch.float32), None]))
    assert result.shape == (2, 3, 48)
    expected = F.linear(x.double(), torch.cat(parts).double())
    expected[..., 5:45] += random(40, dtype=torch.float32)
    assert_close(result, expected)


def test_a_strided_input_is_supported() -> None:
    x, weight = random(6, 64, dtype=torch.float32)[:, ::2], random(40, 32, dtype=torch.float32)
    assert_close(linear(x, PackedWeight([weight])), F.linear(x.double(), weight.double()))


def test_silu_neither_overflows_nor_underflows() -> None:
    one = torch.ones(1, 1)
    packed = PackedWeight([one, one], gated=True)
    result = linear(torch.tensor([[-300.0], [-90.0], [0.0], [90.0], [300.0]]), packed)
    assert result.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 8100.0, 90000.0], abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [(64, 32), (10, 19)])
def test_unpacking_restores_weights_exactly(dtype: torch.dtype, gated: bool, size: tuple[int, int]) -> None:
    weights = [random(size[1], size[0], dtype=dtype, seed=seed) for seed in (1, 2)]
    for weight, restored in zip(weights, PackedWeight(weights, gated=gated).unpack(), strict=True):
        assert torch.equal(weight, restored)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_bitwise_independent_of_other_rows_and_threads(isa: str, dtype: torch.dtype) -> None:
    packed = PackedWeight([random(150, 66, dtype=dtype)])
    x = random(230, 66, dtype=dtype, seed=1)
    together = linear(x, packed)
    for row in (0, 1, 7, 95, 96, 229):
        assert torch.equal(linear(x[row : row + 1], packed), together[row : row + 1])
    assert torch.equal(linear(x[5:22], packed), together[5:22])
    torch.set_num_threads(2)
    assert torch.equal(linear(x, packed), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs", "parts"), [(640, 70, 100), (1700, 450, 47)])
def test_rows_of_several_chunks_are_those_of_one(
    isa: str, dtype: torch.dtype, inputs: int, outputs: int, parts: int
) -> None:
    """Chunks of up to 204 rows; then long rows, in slices, beside so few rows that they are not cut."""
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    packed, x = PackedWeight([weight], [bias]), random(230, inputs, dtype=dtype, seed=2)
    whole = linear(x, packed)
    assert_close(whole, F.linear(x.double(), weight.double(), bias.double()), roundings=16)
    assert torch.equal(whole, torch.cat([linear(part, packed) for part in x.split(parts)]))


def test_half_precision_is_as_precise_as_torch() -> None:
    weight, x = random(256, 512, dtype=torch.bfloat16), random(32, 512, dtype=torch.bfloat16, seed=1)
    exact = F.linear(x.double(), weight.double())
    ours = (linear(x, PackedWeight([weight])).double() - exact).norm()
    torchs = (F.linear(x, weight).double() - exact).norm()
    assert ours <= 1.05 * torchs


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(4, 5, dtype=torch.bfloat16), r"odd number of input features \(5\) in bfloat16"),
        (torch.zeros(4, 6, dtype=torch.float64), "float64"),
        (torch.zeros(4, 6, 2), r"shape \[4, 6, 2\]"),
    ],
)
def test_unsupported_weights_are_rejected_by_name(weight: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PackedWeight([weight])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stored_as", [INT8, FINE_INT8], ids=["int8", "fine int8"])
def test_int8_rounds_weights_and_inputs_to_nearest(
    isa: str, dtype: torch.dtype, gated: bool, stored_as: Int8Format
) -> None:
    """Whole groups of inputs, part of one, and one with a single step; an outlier costs the precision of its group."""
    for size in (64, 68, 192, 36):
        weights = [random(75, size, dtype=dtype, seed=seed) for seed in (1, 2)]
        bias = random(75, dtype=dtype, seed=3)
        packed = PackedWeight(weights, [bias, None], gated=gated, stored_as=stored_as)
        for rows in (1, 7, 40):
            x = 3 * random(rows, size, dtype=dtype, seed=rows)
            x[:, 5] *= 10
            parts = [F.linear(quantized(x, stored_as.input_group), quantized(weight, size)) for weight in weights]
            parts[0] += bias.double()
            expected = F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, dim=1)
            assert_close(linear(x, packed), expected)


def quantized(rows: Tensor, group: int) -> Tensor:
    """The rows rounded to 127 levels on either side of zero, with a scale per group of elements, as float64."""
    parts = []
    for part in rows.split(group, dim=1):
        scale = (part.float().abs().amax(1, keepdim=True) / 127).double()
        parts.append((part.double() / scale).round() * scale)
    return torch.cat(parts, dim=1)


@given(case=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_products_of_codes_are_sums_of_exact_integers(isa: str, case: st.DataObject) -> None:
    """Inputs and weights that eight bits hold exactly, up to the largest bytes."""
    size, outputs, rows = (
        case.draw(st.integers(1, 80)) * 4,
        case.draw(st.integers(1, 70)),
        case.draw(st.integers(1, 30)),
    )
    generator = torch.Generator().manual_seed(case.draw(st.integers(0, 2**16)))
    largest = torch.tensor([-127.0, 127.0])
    x, weight = (torch.randint(-127, 128, (n, size), generator=generator).float() for n in (rows, outputs))
    if case.draw(st.booleans()):
        x, weight = (largest[torch.randint(0, 2, tensor.shape, generator=generator)] for tensor in (x, weight))
    x[:, ::4], weight[:, :1] = 127.0, -127.0
    scales = 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    assert torch.equal(linear(x * scales, PackedWeight([weight], stored_as=INT8)), x @ weight.T * scales)


@in_every_format
def test_a_row_is_bitwise_independent_of_other_rows_in_codes(isa: str, stored_as: WeightFormat) -> None:
    packed = PackedWeight([random(50, 160, dtype=torch.float32)], stored_as=stored_as)
    x = random(200, 160, dtype=torch.float32, seed=1)
    whole = linear(x, packed)
    for first, last in [(9, 10), (0, 3), (150, 167), (100, 200)]:
        assert torch.equal(linear(x[first:last], packed), whole[first:last])
    torch.set_num_threads(2)
    assert torch.equal(linear(x, packed), whole)


@in_every_format
def test_rows_of_zeros_stay_zero_in_codes(stored_as: WeightFormat) -> None:
    zeros, ones = torch.zeros(8, 32), torch.ones(8, 32)
    assert linear(ones[:2], PackedWeight([zeros], stored_as=stored_as)).tolist() == [[0.0] * 8] * 2
    assert linear(zeros[:2], PackedWeight([ones], stored_as=stored_as)).tolist() == [[0.0] * 8] * 2


def test_int8_is_ignored_unless_four_divides_the_input_features() -> None:
    weight = random(8, 6, dtype=torch.float32)
    packed = PackedWeight([weight], stored_as=INT8)
    assert isinstance(packed.codes(), Values)
    assert torch.equal(packed.unpack()[0], weight)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 37, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_every_format
def test_a_row_that_is_not_finite_stays_so_in_codes(
    isa: str, dtype: torch.dtype, place: int, value: float, stored_as: WeightFormat
) -> None:
    weight = PackedWeight([random(75, 160, dtype=dtype)], stored_as=stored_as)
    x = random(3, 160, dtype=dtype, seed=1)
    expected = linear(x, weight)
    x[1, place] = value
    result = linear(x, weight)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


@in_every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_stays_so_in_codes(isa: str, stored_as: WeightFormat, value: float) -> None:
    plain = random(5, 64, dtype=torch.float32)
    plain[2, 7] = value
    result = linear(random(3, 64, dtype=torch.float32, seed=1), PackedWeight([plain], stored_as=stored_as))
    assert (~result.isfinite()).sum(0).tolist() == [0, 0, 3, 0, 0]


def test_long_int8_products_do_not_overflow(isa: str) -> None:
    """Sums of integers are as long as a group of inputs, whatever the size of the layer."""
    size = 2**18
    weight = torch.ones(2, size)
    weight[1] = -1.0
    result = linear(torch.stack([torch.ones(size), -torch.ones(size)]), PackedWeight([weight], stored_as=INT8))
    assert torch.allclose(result, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * size, rtol=1e-6)


def test_numbers_too_small_to_quantize_are_zero(isa: str) -> None:
    packed = PackedWeight([torch.ones(1, 128)], stored_as=INT8)
    x = torch.full((3, 128), 1e-38)
    x[1, :64], x[2] = 1.0, 0.0
    assert linear(x, packed).flatten().tolist() == pytest.approx([0.0, 64.0, 0.0], abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_int4_multiplies_what_its_codes_stand_for(isa: str, dtype: torch.dtype, gated: bool) -> None:
    for size in (32, 64, 224):
        weights = [random(75, size, dtype=dtype, seed=seed) for seed in (1, 2)]
        codes = [INT4.encode(weight).dequantize().double() for weight in weights]
        bias = random(75, dtype=dtype, seed=3)
        packed = PackedWeight(weights, [bias, None], gated=gated, stored_as=INT4)
        for rows in (1, 7, 40):
            x = 3 * random(rows, size, dtype=dtype, seed=rows)
            x[:, 5] *= 10
            parts = [F.linear(quantized(x, 32), weight) for weight in codes]
            parts[0] += bias.double()
            expected = F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, dim=1)
            assert_close(linear(x, packed), expected, roundings=16 if gated else 8)  # both factors have those of a sum


@given(case=st.data())
@settings(max_examples=40, deadline=None)
def test_unpacking_restores_codes_of_four_bits(case: st.DataObject) -> None:
    """All that a file could hold, not just what `encode` chooses."""
    outputs, groups = 2 * case.draw(st.integers(1, 40)), case.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(case.draw(st.integers(0, 2**16)))
    codes = Codes4.empty((outputs, 32 * groups), torch.empty(outputs), torch.empty(outputs))
    codes.values.random_(0, 16, generator=generator)
    codes.group_scales.random_(0, 256, generator=generator)
    codes.group_mins.random_(0, 256, generator=generator)
    codes.scales.uniform_(0, 1, generator=generator)
    codes.mins.uniform_(0, 1, generator=generator)

    class Stored:
        def encode(self, weight: Tensor) -> Codes4:
            return codes

    packed = PackedWeight([torch.empty(outputs, 32 * groups)], gated=case.draw(st.booleans()), stored_as=Stored())
    found = packed.codes()
    assert isinstance(found, Codes4)
    for name in ("values", "group_scales", "group_mins", "scales", "mins"):
        assert torch.equal(getattr(found, name), getattr(codes, name)), name


def test_int4_chooses_better_codes_than_rounding_between_the_extremes() -> None:
    weight = random(64, 512, dtype=torch.float32)
    groups = weight.view(64, 16, 32).double()
    low = groups.amin(2, keepdim=True)
    step = (groups.amax(2, keepdim=True) - low) / 15
    rounded = ((groups - low) / step).round() * step + low
    error = (INT4.encode(weight).dequantize() - weight).double().square().sum()
    assert error < 0.85 * (rounded - groups).square().sum()


def test_int4_rounds_weights_of_large_inputs_less() -> None:
    weight, importance = random(64, 512, dtype=torch.float32), torch.ones(512)
    importance[::16] = 1000.0
    found, plain = (
        ((INT4.encode(weight, given).dequantize() - weight).square() * importance).sum() for given in (importance, None)
    )
    assert found < 0.5 * plain


def test_int4_loses_neither_a_group_with_one_very_large_input_nor_the_others(isa: str) -> None:
    """Such a group has no better fit than any other, and its scale is the unit of all in a feature."""
    weight, importance = random(256, 512, dtype=torch.float32), torch.ones(512)
    importance[64:96], importance[70] = 1e-4, 1e4
    found, plain = (
        (INT4.encode(weight, given).dequantize() - weight).square().unflatten(1, (-1, 32)).sum(2)
        for given in (importance, None)
    )
    assert (found[:, 2] < 4 * plain[:, 2]).all() and found[:, 2].sum() < 1.5 * plain[:, 2].sum()
    assert (found[:, 3:].sum(1) < 1.2 * plain[:, 3:].sum(1)).all()


@pytest.mark.parametrize(
    "group",
    [
        torch.linspace(0.0, 15.0, 32).round(),
        -torch.linspace(0.0, 15.0, 32).round(),
        torch.full((32,), 3.0),
        torch.full((32,), -3.0),
        torch.tensor([1e-20] * 31 + [1e10]),
        torch.tensor([0.0] * 31 + [-7.0]),
    ],
    ids=["positive", "negative", "constant", "negative constant", "huge", "one"],
)
def test_int4_keeps_groups_of_every_kind(group: Tensor) -> None:
    """A range that does not reach zero has no code of its own: the minimum is never below zero."""
    found = INT4.encode(group[None]).dequantize()[0]
    assert (found - group).abs().max() <= group.abs().max() / 128


def test_int4_falls_back_to_eight_bits_unless_32_divides_the_input_features() -> None:
    weight = random(8, 36, dtype=torch.float32)
    x = random(3, 36, dtype=torch.float32, seed=1)
    assert torch.equal(
        linear(x, PackedWeight([weight], stored_as=INT4)), linear(x, PackedWeight([weight], stored_as=INT8))
    )
