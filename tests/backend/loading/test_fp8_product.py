"""Products of numbers in e4m3 where `torch._scaled_mm` has no row-wise scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.loading.load_errors import LoadError
from inflight.loading.quantization import fp8_product
from inflight.loading.quantization.fp8_product import product, that_runs
from inflight.ops.base import QuantizedRows
from inflight.ops.reference_ops import ReferenceOps

E4M3 = torch.float8_e4m3fn
INPUTS, OUTPUTS = 64, 48


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QuantizedRows:
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return ReferenceOps().quantize_rows(x * torch.logspace(-3, 3, count, base=2)[:, None].to(dtype))


WEIGHT = rows_of(OUTPUTS, torch.float32, seed=1)
BIAS = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(2))


class ScaledMm:
    """`torch._scaled_mm` of a card that refuses some products, and computes the others."""

    def __init__(self, refused: Any) -> None:
        self.refused = refused
        self.run = torch._scaled_mm

    def __call__(self, x: Tensor, weight: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        row_wise = scale_a.numel() > 1 or scale_b.numel() > 1
        if self.refused(len(x), row_wise):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`")
        if not row_wise:
            return self.run(x, weight, scale_a=scale_a, scale_b=scale_b, **options)
        out = x.float() @ weight.float() * scale_a * scale_b
        return (out if options["bias"] is None else out + options["bias"].float()).to(options["out_dtype"])


def on_a_card(x: QuantizedRows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same as `product` on a card."""
    options: dict[str, Any] = dict(bias=bias, out_dtype=dtype, use_fast_accum=True)
    return torch._scaled_mm(x.values, weight.t(), scale_a=x.scales[:, None], scale_b=scale[None, :], **options)


@pytest.mark.parametrize(
    ("refused", "used"),
    [
        (lambda rows, row_wise: False, None),
        (lambda rows, row_wise: row_wise and rows < 16, "row-wise products of at least 16 rows"),
        (lambda rows, row_wise: row_wise and rows > 16, "products without scales, which are applied afterwards"),
        (lambda rows, row_wise: row_wise, "products without scales"),
        (lambda rows, row_wise: True, "products of dequantised weights"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_first_product_that_runs_is_used_and_named(
    refused: Any,
    used: str | None,
    dtype: torch.dtype,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", ScaledMm(refused))
    fp8_product._warn_once.cache_clear()
    bias = BIAS.to(dtype) if biased else None
    chosen = that_runs(on_a_card, WEIGHT.values, WEIGHT.scales, bias, dtype)
    assert that_runs(on_a_card, WEIGHT.values, WEIGHT.scales, bias, dtype) is not None
    for count in (1, 2, 15, 16, 17, 40):
        x = rows_of(count, dtype)
        out = chosen(x, WEIGHT.values, WEIGHT.scales, bias, dtype)
        exact = product(x, WEIGHT.values, WEIGHT.scales, bias, torch.float32)
        assert out.dtype == dtype and out.shape == exact.shape
        tolerance = 4 * torch.finfo(dtype).eps
        assert (out.float() - exact).norm(dim=1).le(tolerance * exact.norm(dim=1)).all(), count
    if used is None:
        assert chosen is on_a_card and not caplog.messages
    else:
        (line,) = caplog.messages
        assert line.startswith(f"fp8 layers of size [{OUTPUTS}, {INPUTS}] use {used}")
        assert "CUBLAS_STATUS_NOT_SUPPORTED" in line


def test_if_nothing_runs_the_load_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    monkeypatch.setattr(fp8_product.F, "linear", fail)
    with pytest.raises(LoadError, match=r"size \[48, 64\] runs on this device: at 1 row: no kernel image"):
        that_runs(on_a_card, WEIGHT.values, WEIGHT.scales, None, torch.bfloat16)


def test_running_out_of_memory_is_not_taken_for_a_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_scaled_mm", full)
    with pytest.raises(torch.OutOfMemoryError):
        that_runs(on_a_card, WEIGHT.values, WEIGHT.scales, None, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 17])
def test_substitutes_follow_the_rules_of_scaled_mm_on_a_card(rows: int) -> None:
    """The meta device applies them."""
    values = torch.empty(rows, INPUTS, dtype=E4M3, device="meta")
    x = QuantizedRows(values, torch.empty(rows, device="meta"))
    weight, scale = torch.empty(OUTPUTS, INPUTS, dtype=E4M3, device="meta"), torch.empty(OUTPUTS, device="meta")
    for name, candidate in fp8_product._candidates(on_a_card):
        out = candidate(x, weight, scale, None, torch.bfloat16)
        assert out.shape == (rows, OUTPUTS) and out.dtype == torch.bfloat16, name
