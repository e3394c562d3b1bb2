"""The GPU attention kernel computes the same as the reference: here in the Triton language's interpreter, on a CPU.

tests/gpu repeats this on a device; interpreter and compiled kernels cannot run in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import CASES, FP8, case_of, forced_tile, spec, stored
from fp8_twins import Fp8Reference
from gpu_rounding import gpu_rounding  # noqa: F401  (a fixture)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import nightly_but
from paged_case import VOID, PagedCase, relative_error

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from inflight.attention.base import KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.gpu import gpu_attention, gpu_attention_configs, gpu_attention_kernel
from inflight.kernels.gpu.gpu_attention import GpuAttention, GpuBatch
from inflight.kernels.gpu.gpu_attention_configs import Card, Tile
from inflight.kernels.gpu.launch import interpreted

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
]

ONE_SM = Card((9, 0), 1, 227 * 1024)  # always busy: keys are never split
HUGE = Card((9, 0), 32, 227 * 1024)  # never busy: keys are split wherever possible


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    new_cache = GpuAttention.new_cache

    def poisoned(self: GpuAttention, *args: object) -> object:
        cache = new_cache(self, *args)
        for scratch in self._scratch:
            scratch.fill_(torch.nan)
        return cache

    monkeypatch.setattr(gpu_attention_configs, "SCRATCH_BYTES", 2**20)
    monkeypatch.setattr(gpu_attention, "SCRATCH_BYTES", 2**20)
    monkeypatch.setattr(GpuAttention, "new_cache", poisoned)


IN_SHORT = ("decode", "mix", "head size 80, odd group", "values of another size", "all features", "blocks of two tiles")


@pytest.mark.parametrize("name", nightly_but(IN_SHORT, CASES))
def test_float32_agrees_with_the_reference(name: str) -> None:
    case = case_of(name, torch.float32)
    assert relative_error(case.run(GpuAttention(ONE_SM)), case.run(ReferenceAttention())) < 2e-6


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16], [torch.float16, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", ["mix", "all features"])
def test_half_precision_agrees_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    case = case_of(name, dtype)
    exact = case.with_dtype(torch.float32).run(ReferenceAttention())
    out = case.run(GpuAttention(ONE_SM))
    assert out.dtype == dtype
    assert relative_error(out, exact) < torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("dtype", "features", "seq_lens", "query_lens", "block_size"),
    [
        (torch.float16, {}, [20], [20], 16),
        (torch.float16, {}, [70], [70], 128),
        (torch.float16, {}, [140, 65, 3], [140, 1, 3], 16),
        (torch.float16, {}, [200, 129], [40, 30], 16),
        (torch.bfloat16, dict(sliding_window=90, softcap=9.0, has_sinks=True), [250], [60], 16),
    ],
    ids=["short prompt", "blocks of four tiles", "prompts", "chunks", "features"],
)
def test_late_values_change_no_bit(
    dtype: torch.dtype, features: dict, seq_lens: list[int], query_lens: list[int], block_size: int
) -> None:
    """Values that are multiplied one tile later, with one, several or no tile that needs no mask."""
    case = PagedCase(spec(4, 1, 80, **features), seq_lens, query_lens, block_size, dtype)
    out = []
    for late in (False, True):
        with forced_tile(Tile(64, 32, 4, 2, late)):
            out.append(case.run(GpuAttention(ONE_SM)))
    assert torch.equal(*out)
    assert relative_error(out[1], case.with_dtype(torch.float32).run(ReferenceAttention())) < torch.finfo(dtype).eps


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    kv_heads = draw(st.integers(1, 2))
    size = draw(st.sampled_from([16, 24, 64]))
    layer = LayerSpec(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8, 17])),
        num_kv_heads=kv_heads,
        key_head_size=size,
        value_head_size=draw(st.sampled_from([size, 48])),
        scaling=draw(st.sampled_from([size**-0.5, 1.0])),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 200))),
        softcap=draw(st.sampled_from([None, 5.0])),
        has_sinks=draw(st.booleans()),
    )
    seq_lens = draw(st.lists(st.integers(1, 160), min_size=1, max_size=3))
    query_lens = [draw(st.one_of(st.just(1), st.integers(1, min(length, 60)))) for length in seq_lens]
    return PagedCase(
        layer,
        seq_lens,
        query_lens,
        block_size=draw(st.sampled_from([16, 32, 48, 128])),
        layout=draw(st.sampled_from(["heads first", "fused", "size strided", "contiguous"])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(), card=st.sampled_from([ONE_SM, HUGE]))
def test_any_shape_agrees_with_the_reference(case: PagedCase, card: Card) -> None:
    assert relative_error(case.run(GpuAttention(card)), case.run(ReferenceAttention())) < 5e-6


def parts(batch: GpuBatch) -> list[int]:
    """Of each work item: how many share its query block."""
    (work,) = batch.work.values()
    num_items = int(work.plan[0])
    return work.plan[4 : 4 + 4 * num_items].view(-1, 4)[:, 3].tolist()


class TestSplitKeys:
    LENS = (130, 30, 300)

    @pytest.mark.parametrize(
        "features", [{}, dict(sliding_window=200, softcap=9.0, has_sinks=True)], ids=["plain", "features"]
    )
    @pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 1, 3], [1, 30, 14]], ids=str)
    def test_partial_results_are_joined(self, query_lens: list[int], features: dict) -> None:
        case = PagedCase(spec(2, 1, 32, **features), list(self.LENS), query_lens, 16)
        backend = GpuAttention(HUGE)
        assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 2e-6
        assert max(parts(case.prepared(backend))) > 2

    def test_more_rows_and_blocks_than_programs_that_join_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_attention, "_REDUCE_GRID", (2, 1))
        case = PagedCase(spec(4, 2, 32), [150, 100, 300], [1, 2, 1], 16)
        backend = GpuAttention(HUGE)
        assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 2e-6
        (work,) = case.prepared(backend).work.values()
        assert work.plan[1] == 3

    def test_more_parts_than_are_joined_at_a_time(self) -> None:
        case = PagedCase(spec(1, 1, 16), [40 * 32 + 5, 70], [1, 1], 16)
        backend = GpuAttention(Card((9, 0), 60, 227 * 1024))
        with forced_tile(Tile(0, 16, 4, 1)):
            assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 2e-6
            assert max(parts(case.prepared(backend))) == 41

    def test_a_row_may_see_nothing_of_many_parts(self) -> None:
        """Their maximum is minus infinity and their weight 0, in all that are joined at first."""
        sums, stats = torch.randn(40, 16), torch.zeros(40, 2)
        stats[:, 0], stats[:36] = 3.0, torch.tensor([-torch.inf, 0.0])
        sums[:36], stats[36:, 1] = 0.0, 2.0
        out, plan = torch.full((1, 1, 16), torch.nan), torch.zeros(4 + 4 * 40 + 1, dtype=torch.int32)
        plan[:2], plan[4:164] = torch.tensor([40, 1]), torch.tensor([[0, 0, part, 40] for part in range(40)]).flatten()
        lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5000], dtype=torch.int32)
        gpu_attention_kernel.reduce_kernel[(1, 1, 1)](
            out, sums, stats, *lens, plan, 40, 1,
            NUM_HEADS=1, NUM_KV_HEADS=1, VALUE_SIZE=16, VALUE_PADDED=16, SHORT_ROWS=16, BLOCK_M=0, CHUNK=32,
        )  # fmt: skip
        torch.testing.assert_close(out[0], sums[36:].sum(0, keepdim=True) / 8)

    def test_little_scratch_means_few_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = PagedCase(spec(2, 1, 32), list(self.LENS), [1, 20, 2], 16)
        for scratch, extra in ((2**15, 4), (2**12, 0)):
            monkeypatch.setattr(gpu_attention_configs, "SCRATCH_BYTES", scratch)
            backend = GpuAttention(HUGE)
            assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 2e-6
            (work,) = case.prepared(backend).work.values()
            assert work.room.extra == extra


@contextmanager
def captured() -> Iterator[list[Callable[[], None]]]:
    """Records launches with their arguments, to be repeated as a CUDA graph does: same integers, same addresses."""
    launches: list[Callable[[], None]] = []
    run = InterpretedFunction.run

    def recorded(self: InterpretedFunction, *args: object, **options: object) -> None:
        launches.append(partial(run, self, *args, **options))
        run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recorded)
        yield launches


def pour(case: PagedCase, cache: KVCache) -> None:
    """The case's keys and values into the pool, without the kernel; NaN elsewhere."""
    for pool, numbers in ((cache.key, case.keys), (cache.value, case.values)):
        pool.fill_(torch.nan)
        for row, each in enumerate(numbers):
            blocks = case.block_table()[row, : -(-len(each) // case.block_size)]
            rows = torch.full((len(blocks) * case.block_size, *each.shape[1:]), torch.nan)
            rows[: len(each)] = each
            pool[blocks] = rows.unflatten(0, (-1, case.block_size)).transpose(1, 2)


class Capture:
    """A step of six rows at their full length, captured; replayed for other lengths in the same tensors."""

    ROWS, LONGEST = 6, 500

    def __init__(self, layer: LayerSpec, num_sms: int) -> None:
        full = PagedCase(layer, [self.LONGEST] * self.ROWS, [1] * self.ROWS, 16)
        backend = GpuAttention(Card((9, 0), num_sms, 227 * 1024))
        num_blocks = self.ROWS * -(-self.LONGEST // 16) + 2
        self.layer, self.query, self.sinks = layer, full.query.clone(), full.sinks
        self.cache = backend.new_cache(num_blocks, 16, layer, torch.float32, torch.device("cpu"))
        pour(full, self.cache)
        self.metadata = full.metadata(full.query_lens)
        # No part of a captured step reads the lists, nor the longest length.
        self.metadata.query_start_loc_cpu, self.metadata.seq_lens_cpu, self.metadata.max_seq_len = [], [], -1
        with captured() as self.launches:
            self.batch = backend.prepare(self.metadata)
            self.out = backend.attend(self.query, self.cache, self.batch, layer, self.sinks)
        names = [launch.args[0].fn.__name__ for launch in self.launches]
        assert names == ["plan_kernel", "attend_kernel", "reduce_kernel"]
        self.scratch = backend._scratch

    def replay(self, lengths: list[int], seed: int = 1) -> int:
        """Checks the rows; a length of 0 is padding.  Returns the most parts."""
        case = PagedCase(self.layer, [n or 1 for n in lengths], [min(n, 1) for n in lengths], 16, seed=seed)
        pour(case, self.cache)
        now, rows = case.metadata(case.query_lens, lengths), len(case.query)
        self.metadata.seq_lens.copy_(now.seq_lens)
        self.metadata.query_start_loc.copy_(now.query_start_loc)
        self.metadata.block_table.fill_(VOID)
        self.metadata.block_table[:, : now.block_table.shape[1]] = now.block_table
        self.query[:rows] = case.query
        if self.sinks is not None:
            self.sinks.copy_(case.sinks)
        for tensor in (self.out, *self.scratch):
            tensor.fill_(torch.nan)
        for launch in self.launches:
            launch()
        assert relative_error(self.out[:rows], case.run(ReferenceAttention())) < 2e-6
        assert self.out[rows:].isnan().all(), "padding is not written"
        return max(parts(self.batch))


class TestCapture:
    """Whatever the lengths are when a captured step is replayed: it has baked in nothing but the batch's size."""

    @pytest.mark.parametrize(
        "features", [{}, dict(sliding_window=400, softcap=9.0, has_sinks=True)], ids=["plain", "features"]
    )
    def test_long_beside_short_and_padding(self, features: dict) -> None:
        capture = Capture(spec(2, 1, 32, **features), num_sms=12)
        assert capture.replay([5, 500, 1, 30, 70, 2]) > 4
        assert capture.replay([400, 33, 0, 0, 0, 0]) > 4
        assert capture.replay([1] * 6) == 1
        assert capture.replay([0] * 5 + [490]) > 4

    @pytest.mark.nightly
    def test_any_lengths(self) -> None:
        capture = Capture(spec(2, 1, 32), num_sms=6)

        @settings(max_examples=5, deadline=None)
        @given(st.lists(st.integers(0, 300), min_size=6, max_size=6).filter(any), st.integers(0, 2**16))
        def check(lengths: list[int], seed: int) -> None:
            capture.replay(lengths, seed)

        check()


@pytest.mark.parametrize("query_lens", nightly_but([[20, 0, 1, 0]], [[3, 0, 1, 0], [20, 0, 1, 0]]), ids=str)
def test_rows_without_tokens_are_skipped(query_lens: list[int]) -> None:
    """Such rows pad a batch to the size of a captured launch."""
    case = PagedCase(spec(4, 2, 32), [30, 20, 10, 1], query_lens, 16)
    assert relative_error(case.run(GpuAttention(ONE_SM)), case.run(ReferenceAttention())) < 2e-6


def test_tiles_before_the_window_are_not_read() -> None:
    case = PagedCase(spec(2, 1, 64, sliding_window=50), [900], [1], 16)
    expected = case.run(ReferenceAttention())
    case.keys[0][:700], case.values[0][:700] = torch.nan, torch.nan
    assert relative_error(case.run(GpuAttention()), expected) < 2e-6


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
def test_write_touches_the_mapped_slots_only(dtype: torch.dtype) -> None:
    """Slots in any order, -1 skipped; everything else in the pool is bitwise unchanged."""
    case = PagedCase(spec(4, 2, 24), [40], [1], 16, dtype)
    backend = GpuAttention()
    cache = case.filled_cache(backend)
    metadata = case.metadata([40])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    metadata.slot_mapping = metadata.slot_mapping[order].clone()
    metadata.slot_mapping[::2] = -1
    case.keys[0][order[1::2]] *= 2
    case.values[0][order[1::2]] *= 2
    key, value = case.keys[0][order].clone(), case.values[0][order].clone()
    key[::2], value[::2] = 7.0, 7.0
    backend.write(key, value, cache, backend.prepare(metadata))
    assert torch.equal(case.attend(backend, cache), case.run(backend))
    assert [tensor.isfinite().sum().item() for tensor in (cache.key, cache.value)] == [40 * 2 * 24] * 2


class TestFp8:
    LAYER = replace(CASES["mix"][0], kv_cache_dtype=FP8)

    def test_only_storing_rounds(self) -> None:
        """The result equals attention to the pool's contents, which are rounded to e4m3's three bits of mantissa."""
        _, seq_lens, query_lens, block_size = CASES["mix"]
        case = PagedCase(self.LAYER, seq_lens, query_lens, block_size)
        case.keys = [key * 3 for key in case.keys]
        backend = GpuAttention()
        cache = case.filled_cache(backend)
        out = case.attend(backend, cache)
        exact = stored(case, cache)
        assert cache.key.dtype == FP8
        for kept, actual in zip(exact.keys + exact.values, case.keys + case.values):
            # Rounding to three bits costs 2.6%; the interpreter drops the carry of some roundings.
            assert relative_error(kept, actual) < 0.2
        assert relative_error(out, exact.run(ReferenceAttention())) < 2e-6

    @pytest.mark.usefixtures("gpu_rounding")
    @pytest.mark.parametrize("name", nightly_but(["all features"], ["decode", "mix", "all features"]))
    def test_the_twin_computes_the_same(self, name: str) -> None:
        layer, seq_lens, query_lens, block_size = CASES[name]
        case = PagedCase(replace(layer, kv_cache_dtype=FP8), seq_lens, query_lens, block_size)
        case.keys = [key * 3 for key in case.keys]
        out, plain = case.run(GpuAttention()), case_of(name, torch.float32)
        plain.keys = case.keys
        assert relative_error(out, case.run(Fp8Reference())) < 2e-6
        assert relative_error(out, plain.run(ReferenceAttention())) > 0.005

    def test_scales_are_per_head_and_no_write_changes_them(self) -> None:
        case = PagedCase(spec(2, 2, 32, kv_cache_dtype=FP8), [60], [1], 16)
        backend = GpuAttention()
        cache = case.filled_cache(backend)
        before = cache.key_scale.clone(), cache.value_scale.clone()
        assert before[0][0] != before[0][1]
        batch = backend.prepare(case.metadata([60]))
        backend.write(case.keys[0] * 1e6, case.values[0] * 1e-6, cache, batch)
        assert torch.equal(cache.key_scale, before[0])
        assert torch.equal(cache.value_scale, before[1])
        keys, values = (pool.float()[pool.float().isfinite()] for pool in (cache.key, cache.value))
        assert keys.abs().max() == 448, "what exceeds the scale saturates"
        assert values.abs().max() < 1e-3
