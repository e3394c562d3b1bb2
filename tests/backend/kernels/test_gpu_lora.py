"""Products of adapters: the kernels against float64 and their twin, and their compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiled
from launches import Launches, to_meta
from lora_slots import exact_sums, lora_slots
from nightly import nightly_but

pytest.importorskip("triton")

from inflight.kernels.gpu.gpu_lora import MAX_SPLIT_ROWS, GpuLora, splits_of
from inflight.kernels.gpu.launch import interpreted
from inflight.ops.lora import LoraOps, LoraSlots, ReferenceLora, padded_rank

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="there is neither a GPU nor an interpreter"),
    pytest.mark.usefixtures("gpu_rounding"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
# inputs, outputs of the layers, rank; several splits, tiles that layers end in, several blocks of ranks
SHAPES: list[tuple[int, tuple[int, ...], int]] = [
    (600, (70, 24, 24), 16),
    (64, (65, 130), 32),
    (40, (96,), 128),
    (300, (40,), 256),
]
COUNTS = (1, 16, 17, MAX_SPLIT_ROWS + 1)
HALF = [torch.bfloat16, torch.float16]


def case(shape: tuple[int, tuple[int, ...], int], count: int, dtype: torch.dtype, slots: int = 3) -> Any:
    """Slots, rows as slices of wider ones with NaN around them, a slot or none for each row, and outputs."""
    num_inputs, sizes, rank = shape
    made = lora_slots(slots, num_inputs, sizes, rank, dtype, DEVICE)
    generator = torch.Generator().manual_seed(count)
    wide = torch.full((count, num_inputs + 32), torch.nan, dtype=dtype)
    wide[:, 16:-16] = torch.randn(count, num_inputs, generator=generator)
    of_token = torch.randint(-1, slots, (count,), generator=generator, dtype=torch.int32)
    y = torch.randn(count, sum(sizes), generator=generator).to(dtype)
    return made, wide.to(DEVICE)[:, 16:-16], of_token.to(DEVICE), y.to(DEVICE)


def added(ops: LoraOps, slots: LoraSlots, x: torch.Tensor, of_token: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ops.prepare(slots, len(x))
    result = y.clone()
    ops.add(x, slots, of_token, result)
    return result


def off(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "case_of",
    nightly_but(
        [*((shape, torch.bfloat16) for shape in SHAPES), (SHAPES[1], torch.float32)],
        [(shape, dtype) for dtype in (*HALF, torch.float32) for shape in SHAPES],
    ),
    ids=str,
)
def test_sums_are_those_of_float64(case_of: tuple[Any, torch.dtype]) -> None:
    """Up to the rounding of the inner numbers and of a result, each half of eps at most; and so are the twin's."""
    shape, dtype = case_of
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 8 * torch.finfo(dtype).eps
    for count in (17, MAX_SPLIT_ROWS + 1):
        slots, x, of_token, y = case(shape, count, dtype)
        of_token[0] = 1
        exact = exact_sums(x, slots, of_token, y)
        for ops in (GpuLora(), ReferenceLora()):
            result = added(ops, slots, x, of_token, y)
            assert off(result, exact) < 0.6 * eps, (ops.name, count)
            assert torch.equal(result[of_token < 0], y[of_token < 0]), "a row without an adapter keeps its bits"
            assert not torch.equal(result[0], y[0])


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16], [*HALF, torch.float32]), ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Alone, beside rows of other adapters and of none, in a tile of 16 or of 64, and with its adapter elsewhere."""
    slots, x, of_token, y = case(SHAPES[0], 100, dtype, slots=4)
    ops = GpuLora()
    ops.prepare(slots, 100)
    whole = added(ops, slots, x, of_token, y)
    for count in COUNTS:
        first = (7 * count) % (101 - count)
        rows = slice(first, first + count)
        assert torch.equal(added(ops, slots, x[rows], of_token[rows], y[rows]), whole[rows]), count
    moved = LoraSlots(slots.a.roll(1, 0), slots.b.roll(1, 0), slots.sizes)
    elsewhere = torch.where(of_token < 0, of_token, (of_token + 1) % 4)
    assert torch.equal(added(ops, moved, x[:17], elsewhere[:17], y[:17]), whole[:17])
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(added(ops, slots, x[order], of_token[order], y[order]), whole[order])


def test_what_is_undefined_stays_where_it_is() -> None:
    """Rows that are not finite, slots that no row has, scratch and tokens behind the last."""
    slots, x, of_token, y = case(SHAPES[0], 40, torch.bfloat16)
    ops = GpuLora()
    ops.prepare(slots, 40)
    assert ops._sums is not None
    ops._sums.fill_(torch.nan)
    of_token.clamp_(max=1)
    of_token[3], of_token[11] = 0, 1
    right = added(ops, slots, x, of_token, y)
    slots.a[2], slots.b[2] = torch.nan, torch.nan
    spoilt = x.clone()
    spoilt[3, 7], spoilt[11, 599] = torch.nan, torch.inf
    out = added(ops, slots, spoilt, of_token, y)
    others = [row for row in range(40) if row not in (3, 11)]
    assert torch.equal(out[others], right[others])
    assert bool(out[3].isnan().all()) and not bool(out[11].isfinite().any())
    assert added(ops, slots, x[:0], of_token[:0], y[:0]).shape == (0, 118)


def test_a_rank_below_that_of_the_slots_is_padded_with_zeros() -> None:
    slots, x, of_token, y = case(SHAPES[1], 20, torch.float32)
    for matrices in (slots.a.unflatten(1, (2, 32))[:, :, 5:], slots.b[:, :, 5:]):
        matrices.zero_()
    small = LoraSlots(
        slots.a.unflatten(1, (2, 32))[:, :, :16].flatten(1, 2).contiguous(),
        slots.b[:, :, :16].contiguous(),
        slots.sizes,
    )
    assert torch.allclose(added(GpuLora(), slots, x, of_token, y), added(GpuLora(), small, x, of_token, y), atol=1e-6)


def test_outputs_that_are_a_slice_of_wider_rows() -> None:
    slots, x, of_token, y = case(SHAPES[1], 20, torch.float16)
    wide = torch.full((20, 250), -7.0, dtype=torch.float16, device=DEVICE)
    wide[:, 30:225] = y
    ops = GpuLora()
    expected = added(ops, slots, x, of_token, y)
    ops.add(x, slots, of_token, wide[:, 30:225])
    assert torch.equal(wide[:, 30:225], expected)
    assert bool((wide[:, :30] == -7).all()) and bool((wide[:, 225:] == -7).all())


def test_splits_follow_from_the_size_alone() -> None:
    for num_inputs, expected in ((64, (1, 1)), (1024, (4, 2)), (4096, (16, 2)), (14336, (16, 7)), (3000, (12, 2))):
        count, blocks = splits_of(num_inputs)
        assert (count, blocks) == expected
        assert (count - 1) * blocks * 128 < num_inputs <= count * blocks * 128


def test_padded_ranks() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 16, 17, 64, 100, 256)] == [16, 16, 16, 32, 64, 128, 256]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    slots = lora_slots(64, 128, (64, 64, 64), 16, torch.bfloat16)
    slots = LoraSlots(to_meta(slots.a), to_meta(slots.b), slots.sizes)
    ops = GpuLora()
    ops.prepare(slots, 2**17)
    for count in (1, MAX_SPLIT_ROWS, 2**17):
        launches.names.clear()
        x, y = (torch.empty(count, size, dtype=torch.bfloat16, device="meta") for size in (128, 192))
        with launches:
            ops.add(x, slots, torch.empty(count, dtype=torch.int32, device="meta"), y)
        assert launches.names == ["lora_shrink_kernel", "lora_expand_kernel"]


SCRIPT = """
import json, sys
import torch
from gpu_target import target
from lora_slots import lora_slots
from inflight.kernels.gpu.gpu_lora import GpuLora

arch, dtype, num_inputs, sizes, rank = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
slots, ops = lora_slots(2, num_inputs, tuple(sizes), rank, dtype), GpuLora()
ops.prepare(slots, 2048)
with target(arch) as compiled:
    for rows in (1, 65, 2, 16, 17, 64, 80, 2048):
        x, y = torch.empty(rows, num_inputs, dtype=dtype), torch.empty(rows, sum(sizes), dtype=dtype)
        ops.add(x, slots, torch.zeros(rows, dtype=torch.int32), y)
        at_load = len(compiled) if rows <= 1 or rows == 65 else at_load
print(json.dumps([at_load, [kernel.report(arch) for kernel in compiled]]))
"""
SOURCES = ["backend/inflight/kernels/gpu", "backend/inflight/ops/lora.py"]
SOURCES += ["tests/support/gpu_target.py", "tests/support/lora_slots.py"]
PRODUCT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
QKV, GATE_UP, DOWN = [4096, [4096, 1024, 1024]], [1024, [3072, 3072]], [14336, [4096]]
CASES = [
    (90, "bfloat16", *QKV, 16),
    *((arch, "bfloat16", *QKV, 16) for arch in (80, 100, 120)),
    *((arch, "bfloat16", *GATE_UP, 64) for arch in (80, 90, 100, 120)),
    *((arch, "bfloat16", *DOWN, 256) for arch in (80, 90, 100)),
    (90, "float16", *GATE_UP, 32),
    (90, "float32", *GATE_UP, 16),
]


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_is_compiled_at_load(tmp_path: Path, cache: pytest.Cache, case: Any) -> None:
    """Two products with two tiles each, whatever the batch; two registers spill, more only in float32."""
    arch, dtype, _, _, rank = case
    at_load, kernels = compiled(cache, tmp_path, "lora", SCRIPT, list(case), SOURCES)
    assert at_load == len(kernels) == 4
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["stack_bytes"] <= (8 if dtype != "float32" else 256)
        if kernel["kernel"] == "lora_shrink_kernel":
            assert "cp.async.cg" in kernel["instructions"]
        alike = [other["instructions"] for other in kernels if other["kernel"] == kernel["kernel"]]
        assert alike[0] == alike[1], "one kind of instruction in both tiles, so that rows have the same bits"
        wide_enough = kernel["kernel"] == "lora_expand_kernel" or rank >= 64
        assert dtype == "float32" or alike[0][-1] == (PRODUCT[arch] if wide_enough else "mma.sync")
