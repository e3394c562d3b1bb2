"""The small operations in the Triton language against `ReferenceOps`, in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu.launch import can_launch
from inflight.kernels.registry import select_ops
from inflight.ops.base import QuantizedRows
from inflight.ops.reference_ops import ReferenceOps

pytestmark = pytest.mark.usefixtures("gpu_rounding")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels, reference = GpuOps(), ReferenceOps()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def poisoned(rows: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """The same rows as a slice of wider ones, surrounded by NaN."""
    wide = torch.full((*rows.shape[:-1], left + rows.shape[-1] + right), float("nan"), dtype=rows.dtype, device=DEVICE)
    wide[..., left : left + rows.shape[-1]] = rows
    return wide[..., left : left + rows.shape[-1]]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding of the dtype, and of the float32 sums."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    tolerance = max(torch.finfo(got.dtype).eps, 1e-6)
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 96), (5, 5000), (33, 8), (2, 3, 64), (7, 5, 80)], ids=str)
def test_rms_norm(shape, dtype):
    x, weight = poisoned(random(*shape, dtype=dtype), 16, 8), random(shape[-1], dtype=dtype, seed=1)
    out = kernels.rms_norm(x, weight, 1e-5)
    assert out.is_contiguous()
    assert_close(out, reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_with_a_float32_weight_and_16_bit_rows():
    x, weight = random(4, 64, dtype=torch.bfloat16), random(64, seed=1)
    assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_zeros_is_zero():
    assert (kernels.rms_norm(torch.zeros(2, 32, device=DEVICE), torch.ones(32, device=DEVICE), 1e-6) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (9, 96), (3, 2560)], ids=str)
def test_add_rms_norm(shape, dtype):
    """The residual is bitwise equal: differences would add up over the layers."""
    x, residual = poisoned(random(*shape, dtype=dtype), 8, 8), random(*shape, dtype=dtype, seed=1) * 3
    weight, expected = random(shape[-1], dtype=dtype, seed=2), residual.clone()
    out = kernels.add_rms_norm(x, residual, weight, 1e-5)
    reference.add_rms_norm(x, expected, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert_close(out, reference.rms_norm(residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "rotated"), [((4, 2), 64, 64), ((3, 3), 80, 32), ((1, 1), 12, 6), ((40, 8), 128, 128)], ids=str
)
def test_rotary_is_bitwise_equal(heads, size, rotated, dtype):
    """Rows are slices of one merged projection; its other elements are unchanged."""
    tokens, (query_heads, key_heads) = 3, heads
    merged = random(tokens, (query_heads + 2 * key_heads) * size, dtype=dtype)
    expected = merged.clone()
    cos, sin = random(tokens, rotated, dtype=dtype, seed=1), random(tokens, rotated, dtype=dtype, seed=2)
    for ops, rows in ((kernels, merged), (reference, expected)):
        query, key, _ = rows.view(tokens, -1, size).split((query_heads, key_heads, key_heads), dim=1)
        ops.rotary(query, key, cos, sin)
    assert torch.equal(merged, expected)
    assert not torch.equal(merged[:, :rotated], random(tokens, rotated, dtype=dtype))


def test_rotary_of_transposed_tensors():
    query, key = random(4, 6, 32).transpose(0, 1), random(2, 6, 32, seed=1).transpose(0, 1)
    cos, sin = random(6, 32, seed=2), random(6, 32, seed=3)
    expected = query.clone(), key.clone()
    reference.rotary(*expected, cos, sin)
    kernels.rotary(query, key, cos, sin)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (5, 200), (2, 9000)], ids=str)
def test_silu_and_mul(shape, dtype):
    gate_up = poisoned(random(shape[0], 2 * shape[1], dtype=dtype) * 8, 8, 16)
    out = kernels.silu_and_mul(gate_up)
    assert out.is_contiguous()
    assert_close(out, reference.silu_and_mul(gate_up))


def test_silu_does_not_overflow():
    gate_up = torch.tensor([[-1e4, 1e4, -89.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (33, 96), (3, 5000)], ids=str)
def test_quantized_rows_are_bitwise_equal(shape, dtype):
    sizes = 2.0 ** (torch.arange(shape[0], device=DEVICE) % 12 - 6)
    x = random(*shape, dtype=dtype) * sizes.to(dtype)[:, None]
    got, expected = kernels.quantize_rows(poisoned(x, 16, 8)), reference.quantize_rows(x)
    assert_same_rows(got, expected)
    assert (got.values.float().abs().amax(-1) == 448).all(), "the whole range is used"
    error = (got.values.float() * got.scales[:, None] - x.float()).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, got.scales[:, None] * 2**-9)).all()


def assert_same_rows(got: QuantizedRows, expected: QuantizedRows) -> None:
    assert got.values.dtype == torch.float8_e4m3fn
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (33, 96), (3, 5000)], ids=str)
def test_quantized_results_are_those_of_two_steps(shape, dtype):
    """Bitwise: a norm or a gate, rounded to its dtype, then quantized."""
    x, weight = poisoned(random(*shape, dtype=dtype), 16, 8), random(shape[1], dtype=dtype, seed=1)
    assert_same_rows(
        kernels.rms_norm(x, weight, 1e-5, quantized=True), kernels.quantize_rows(kernels.rms_norm(x, weight, 1e-5))
    )
    sums = [random(*shape, dtype=dtype, seed=2) for _ in range(2)]
    got = kernels.add_rms_norm(x, sums[0], weight, 1e-5, 0.22, quantized=True)
    assert_same_rows(got, kernels.quantize_rows(kernels.add_rms_norm(x, sums[1], weight, 1e-5, 0.22)))
    assert torch.equal(*sums)
    gate_up = poisoned(random(shape[0], 2 * shape[1], dtype=dtype, seed=3) * 8, 8, 16)
    assert_same_rows(
        kernels.silu_and_mul(gate_up, quantized=True), kernels.quantize_rows(kernels.silu_and_mul(gate_up))
    )


def test_a_factor_of_what_is_added():
    """Of the product, not of the sum; both in float32, rounded once."""
    x, residual = random(5, 96, dtype=torch.bfloat16), random(5, 96, dtype=torch.bfloat16, seed=1)
    weight, expected = torch.ones(96, device=DEVICE), residual.clone()
    sums = (residual.float() + x.float() * 0.22).bfloat16()
    kernels.add_rms_norm(x, residual, weight, 1e-5, 0.22)
    reference.add_rms_norm(x, expected, weight, 1e-5, 0.22)
    assert torch.equal(residual, sums)
    assert torch.equal(expected, sums)


def test_quantized_rows_at_the_limits():
    """Zeros stay zeros, numbers too small for a scale round to zero, NaN stays NaN."""
    x = torch.zeros(4, 32, device=DEVICE)
    x[1, 3], x[2, 5], x[3, 7] = 1e-30, torch.finfo(torch.float32).max, torch.nan
    for ops in (kernels, reference):
        rows = ops.quantize_rows(x)
        assert (rows.values[:2].float() == 0).all() and (rows.scales[:2] == 1e-12).all()
        assert rows.values[2, 5].float() == 448
        assert rows.values[3, 7].isnan()
    assert kernels.quantize_rows(x[:0]).values.shape == (0, 32)


def test_no_tokens():
    empty, weight = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert kernels.rms_norm(empty, weight, 1e-6).shape == (0, 64)
    assert kernels.add_rms_norm(empty, empty.clone(), weight, 1e-6).shape == (0, 64)
    assert kernels.silu_and_mul(empty).shape == (0, 32)
    assert kernels.rms_norm(empty, weight, 1e-6, quantized=True).values.shape == (0, 64)
    assert kernels.add_rms_norm(empty, empty.clone(), weight, 1e-6, quantized=True).scales.shape == (0,)
    assert kernels.silu_and_mul(empty, quantized=True).values.shape == (0, 32)
    kernels.rotary(empty.view(0, 2, 32), empty.view(0, 2, 32), empty[:, :32], empty[:, :32])


def test_rows_that_are_not_contiguous_are_rejected():
    with pytest.raises(ValueError, match="contiguous"):
        kernels.silu_and_mul(random(64, 4).T)


def test_rows_too_wide_for_a_program_are_rejected():
    with pytest.raises(ValueError, match="maximum is 65536"):
        kernels.rms_norm(random(1, 70000), random(70000), 1e-6)


def test_the_choice_of_an_implementation(monkeypatch):
    """Launchers are built with a C compiler; without one, torch computes on a GPU, too."""
    cuda = torch.device("cuda")
    monkeypatch.setenv("CC", "gcc")
    can_launch.cache_clear()
    assert select_ops(cuda).name == "gpu"
    assert select_ops(torch.device("cpu")).name == "reference"
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    can_launch.cache_clear()
    assert select_ops(cuda).name == "reference"
    can_launch.cache_clear()
