"""Products with weights in four bits: the kernels against the codes in float64, and their compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import compiled
from int4_layers import KINDS, int4_weight
from launches import Launches, to_meta
from nightly import nightly_but

pytest.importorskip("triton")

from inflight.kernels.gpu.gpu_int4 import MAX_ROWS, GpuInt4, parts_of
from inflight.kernels.gpu.launch import interpreted
from inflight.ops.int4 import Int4Weight, ReferenceInt4, span_of, tiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="there is neither a GPU nor an interpreter"),
    pytest.mark.usefixtures("gpu_rounding"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
# outputs, inputs, group: several parts; groups of a half, a whole and several blocks; all inputs in one
SIZES = [(40, 256, 16), (130, 128, 32), (72, 96, 32), (64, 384, 64), (70, 256, 128), (33, 96, 96)]

EDGES = (1, 2, 8, 15, 16, 17, 31, 32, 33, 47, 63)  # of tiles


def on_device(weight: Int4Weight) -> Int4Weight:
    parts = (weight.codes, weight.scales, weight.offsets, weight.factors)
    return Int4Weight(*(None if part is None else part.to(DEVICE) for part in parts))  # type: ignore[arg-type]


def prepared(weight: Int4Weight, dtype: torch.dtype) -> tuple[GpuInt4, Int4Weight]:
    ops, weight = GpuInt4(), on_device(weight)
    ops.prepare(weight, dtype)
    return ops, weight


def rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """As a slice of wider ones, surrounded by NaN."""
    wide = torch.full((count, inputs + 32), torch.nan, dtype=dtype)
    wide[:, 16:-16] = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    return wide.to(DEVICE)[:, 16:-16]


def off(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_code_and_zero_point_is_exact(dtype: torch.dtype) -> None:
    """Rows that select one input each; scales that are powers of 2."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 4)
    zeros, scale = torch.arange(16, dtype=torch.uint8)[None], torch.full((1, 16), 0.25, dtype=torch.bfloat16)
    ops, weight = prepared(Int4Weight(tiled(codes, 32), scale, zeros), dtype)
    out = ops.linear(torch.eye(64, dtype=dtype, device=DEVICE), weight, None)
    assert torch.equal(out.t().cpu().float(), (codes.float() - zeros.t()) / 4)


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16], [torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_products_are_those_of_the_codes(outputs: int, inputs: int, group: int, kind: str, dtype: torch.dtype) -> None:
    """Up to the rounding of a result, half of eps at most; above MAX_ROWS also up to that of the weight."""
    made, exact_weight = int4_weight(outputs, inputs, group, kind)
    ops, weight = prepared(made, dtype)
    bias, eps = torch.randn(outputs).to(dtype), torch.finfo(dtype).eps
    for count in (1, 17, 64, 65):
        x = rows(count, inputs, dtype)
        exact = F.linear(x.cpu().double(), exact_weight, bias.double())
        out = ops.linear(x, weight, bias.to(DEVICE))
        assert out.dtype == dtype
        assert off(out, exact) < (0.51 if count <= MAX_ROWS else 0.75) * eps
        assert off(ReferenceInt4().linear(x.cpu(), made, bias), exact) < (0.51 if count <= MAX_ROWS else 0.75) * eps


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_other_dtypes(scales: torch.dtype) -> None:
    made, exact = int4_weight(40, 64, 32, "zeros", scales)
    ops, weight = prepared(made, torch.float16)
    x = rows(3, 64, torch.float16)
    assert off(ops.linear(x, weight, None), F.linear(x.cpu().double(), exact)) < 0.0004


@pytest.mark.parametrize("counts", nightly_but([EDGES], [EDGES, range(1, MAX_ROWS)]), ids=["edges", "all"])
def test_a_row_has_the_same_bits_in_every_batch_of_up_to_64(counts: Sequence[int]) -> None:
    made, _ = int4_weight(40, 256, 16, "mins")
    ops, weight = prepared(made, torch.bfloat16)
    assert parts_of(weight).count == 2
    x = rows(MAX_ROWS, 256, torch.bfloat16)
    whole = ops.linear(x, weight, None)
    for count in counts:
        first = (7 * count) % (MAX_ROWS - count + 1)
        assert torch.equal(ops.linear(x[first : first + count], weight, None), whole[first : first + count])


def test_parts_follow_from_the_size_alone() -> None:
    """Llama 3 8B's layers fill a card; small ones are not cut into parts without work."""
    for outputs, inputs, expected in ((6144, 4096, 5), (4096, 14336, 8), (28672, 4096, 1), (64, 128, 1)):
        weight = Int4Weight(torch.empty(inputs // 128, outputs, 64, device="meta"), torch.empty(1, device="meta"))
        parts = parts_of(weight)
        assert parts.count == expected
        assert (parts.count - 1) * parts.blocks < inputs // 128 <= parts.count * parts.blocks


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_none_stay_in_their_row(kind: str) -> None:
    made, _ = int4_weight(40, 256, 16, kind)
    ops, weight = prepared(made, torch.bfloat16)
    x = rows(20, 256, torch.bfloat16)
    right = ops.linear(x, weight, None)
    spoilt = x.clone()
    spoilt[3, 7], spoilt[11, 200] = torch.nan, torch.inf
    out = ops.linear(spoilt, weight, None)
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(out[others], right[others])
    assert bool(out[3].isnan().all()) and not bool(out[11].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights_are_the_twins(kind: str) -> None:
    made, exact = int4_weight(130, 96, 32, kind)
    ops, weight = prepared(made, torch.float16)
    twin = made.dequantised(torch.float16)
    assert torch.equal(twin, exact.half()) or kind == "mins"
    assert (ops.dequantised(weight, torch.float16).cpu() - twin).abs().max() <= 2**-11 * twin.abs().max()


def test_parts_of_a_merged_layer_and_no_rows() -> None:
    """Tensors that are slices along the outputs."""
    made, exact = int4_weight(80, 128, 32, "mins")
    part = Int4Weight(*(x[:, 24:64] for x in (made.codes, made.scales, made.offsets, made.factors)))  # type: ignore[index]
    ops, weight = GpuInt4(), part
    ops.prepare(weight, torch.float16)
    x = rows(5, 128, torch.float16)
    assert off(ops.linear(x, weight, None), F.linear(x.cpu().double(), exact[24:64])) < 0.0004
    assert ops.linear(x[:0], weight, None).shape == (0, 40)
    assert torch.equal(ops.linear(x.t().contiguous().t(), weight, None), ops.linear(x, weight, None))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    found: dict[tuple[int, int], list[str]] = {}
    for inputs in (128, 1024):
        weight = int4_weight(64, inputs, 64, "zeros")[0]
        weight = replace(weight, **{name: to_meta(getattr(weight, name)) for name in ("codes", "scales", "offsets")})
        ops = GpuInt4()
        ops.prepare(weight, torch.bfloat16)
        for count in (64, 65):
            launches.names.clear()
            with launches:
                ops.linear(torch.empty(count, inputs, dtype=torch.bfloat16, device="meta"), weight, None)
            found[inputs, count] = [*launches.names]
    assert found[128, 64] == ["int4_kernel"]
    assert found[1024, 64] == ["int4_kernel", "int4_sum_kernel"]
    assert found[128, 65] == ["int4_dequantise_kernel", "aten.mm"]


def test_the_scratch_is_as_large_as_the_largest_layer_needs() -> None:
    ops = GpuInt4()
    small, large = int4_weight(40, 64, 32, "zeros")[0], int4_weight(40, 1024, 64, "zeros")[0]
    for weight in (small, large, small):
        ops.prepare(on_device(weight), torch.bfloat16)
    assert ops._plain is not None and ops._sums is not None
    assert ops._plain.numel() == 40 * 1024
    assert ops._sums.numel() == 2 * MAX_ROWS * 40


def test_spans() -> None:
    assert [span_of(inputs, group) for inputs, group in ((256, 128), (192, 64), (96, 32), (128, 32), (96, 96))] == [
        64,
        32,
        16,
        32,
        16,
    ]
    assert span_of(48, 16) is None and span_of(64, 8) is None


SCRIPT = """
import json, sys
import torch
from gpu_target import target
from int4_layers import int4_weight
from inflight.kernels.gpu.gpu_int4 import GpuInt4

arch, dtype, outputs, inputs, group, kind = json.loads(sys.argv[1])
weight, _ = int4_weight(outputs, inputs, group, kind)
like = torch.empty(0, dtype=getattr(torch, dtype))
ops = GpuInt4()
ops.prepare(weight, like.dtype)
with target(arch) as compiled:
    for rows in (1, 17, 33):
        ops.linear(like.new_empty(rows, inputs), weight, None)
    ops.dequantised(weight, like.dtype)
    at_load = len(compiled)
    for rows in (2, 16, 18, 64):
        ops.linear(like.new_empty(rows, inputs), weight, None)
print(json.dumps([at_load, [kernel.report(arch) for kernel in compiled]]))
"""
SOURCES = ["backend/inflight/kernels/gpu", "backend/inflight/ops/int4.py"]
SOURCES += ["tests/support/gpu_target.py", "tests/support/int4_layers.py"]
PRODUCT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
CASES = [
    (90, "bfloat16", 1024, 1024, 32, "mins"),
    *((arch, "bfloat16", 1024, 1024, 32, "mins") for arch in (80, 100, 120)),
    *((arch, "bfloat16", 1024, 1024, 128, "zeros") for arch in (80, 90, 100, 120)),
    (90, "float16", 1024, 1024, 128, "symmetric"),
    (90, "bfloat16", 1000, 1088, 1088, "symmetric"),
]


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_is_compiled_at_load(tmp_path: Path, cache: pytest.Cache, case: Any) -> None:
    """Three tiles, the sum of parts and the dequantised weight, whatever the batch; nothing spills."""
    arch = case[0]
    at_load, kernels = compiled(cache, tmp_path, "int4", SCRIPT, list(case), SOURCES)
    products = [kernel for kernel in kernels if kernel["kernel"] == "int4_kernel"]
    assert sorted(kernel["block_m"] for kernel in products) == [16, 32, 64]
    assert at_load == len(kernels) == 5
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["stack_bytes"] == 0, "nothing spills"
    for kernel in products:  # one kind of instruction in all, so that rows have the same bits in all
        assert kernel["instructions"] == ["cp.async.cg", PRODUCT[arch]]
