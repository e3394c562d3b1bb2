"""Tile shapes of the GPU attention kernel and how it splits keys: arithmetic that needs no kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import spec
from hypothesis import given
from hypothesis import strategies as st
from paged_case import PagedCase

from inflight.attention.base import AttentionMetadata
from inflight.attention.reference import ReferenceAttention
from inflight.attention.selection import select_backend
from inflight.config import ConfigError
from inflight.kernels.gpu import gpu_attention, launch
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import (
    MAX_SPLITS,
    SCRATCH_BYTES,
    Card,
    Geometry,
    SplitPlan,
    Tile,
    padded,
    plan_splits,
    tile_for,
)

H200, A100, L40S = Card((9, 0), 132, 227 * 1024), Card((8, 0), 108, 163 * 1024), Card((8, 9), 142, 99 * 1024)
DECODE = Geometry(Tile(0, 64, 4, 3), group=4, num_kv_heads=8, value_padded=128, window=0)
MIXED = Geometry(Tile(128, 64, 8, 3), group=4, num_kv_heads=8, value_padded=128, window=0)
CPU = torch.device("cpu")


def metadata(seq_lens: list[int], query_lens: list[int]) -> AttentionMetadata:
    query_start_loc = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    unused = torch.empty(0)
    return AttentionMetadata(
        unused, unused, unused, unused, query_start_loc, seq_lens, max(query_lens), max(seq_lens), 16
    )


def plan(geometry: Geometry, seq_lens: list[int], query_lens: list[int], running: int = 264) -> SplitPlan:
    return plan_splits(geometry, metadata(seq_lens, query_lens), running)


def test_keys_are_not_split_if_the_card_is_busy() -> None:
    assert plan(DECODE, [2048] * 64, [1] * 64) == SplitPlan()
    assert plan(MIXED, [8192], [8192]) == SplitPlan()


@pytest.mark.parametrize(("requests", "length"), [(1, 32768), (8, 16384), (3, 4096)])
def test_few_long_contexts_are_split_to_fill_the_card(requests: int, length: int) -> None:
    chosen = plan(DECODE, [length] * requests, [1] * requests)
    programs = requests * DECODE.num_kv_heads * chosen.num_splits
    assert programs >= 0.9 * 264 or chosen.num_splits == MAX_SPLITS
    assert chosen.num_splits * chosen.split_tiles * 64 >= length


def test_one_long_context_among_short_ones_is_split() -> None:
    assert plan(DECODE, [512] * 60 + [60000], [1] * 61).num_splits > 1
    mixed = plan(MIXED, [2048, 60000], [2048, 1], running=132)
    assert mixed.num_splits > 1 and mixed.short_only, "the prompt's partial results do not fit the scratch"


def test_a_short_chunk_at_a_long_context_is_split() -> None:
    chosen = plan(MIXED, [16384], [64], running=132)
    assert chosen.num_splits > 1 and not chosen.short_only


@given(
    requests=st.lists(st.tuples(st.integers(1, 40000), st.integers(0, 3000)), min_size=1, max_size=40),
    geometry=st.sampled_from([DECODE, MIXED]),
    running=st.sampled_from([4, 132, 264, 2000]),
    window=st.sampled_from([0, 4096]),
)
def test_partial_results_always_fit_the_scratch(requests, geometry, running, window) -> None:
    seq_lens = [length for length, _ in requests]
    query_lens = [min(length, count if geometry is MIXED else 1) for length, count in requests]
    geometry = Geometry(geometry.tile, geometry.group, geometry.num_kv_heads, 256, window)
    chosen = plan(geometry, seq_lens, query_lens, running)
    assert 1 <= chosen.num_splits <= MAX_SPLITS
    rows = chosen.slots * geometry.num_kv_heads * chosen.slot_rows * chosen.num_splits
    assert rows * geometry.value_padded * 4 <= SCRATCH_BYTES
    if chosen.num_splits > 1:
        num_blocks = geometry.num_blocks(sum(query_lens), len(seq_lens))
        assert chosen.slots == (len(seq_lens) if chosen.short_only else num_blocks)


@pytest.mark.parametrize("card", [H200, A100, L40S], ids=["H200", "A100", "L40S"])
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_head_size_has_tiles_that_fit(card: Card, size: int, dtype: torch.dtype) -> None:
    for is_decode in (True, False):
        tile = tile_for(card, spec(8, 2, size), dtype, is_decode)
        assert (tile.block_m == 0) == is_decode
        stage = 2 * tile.block_n * padded(size) * dtype.itemsize
        assert stage * max(1, tile.num_stages - 1) + tile.block_m * padded(size) * dtype.itemsize <= card.shared_memory


@pytest.mark.parametrize(
    ("registers", "shared", "expected"),
    [(116, 71680, 3), (128, 1024, 4), (32, 0, 12), (255, 131072, 1), (168, 1024, 3)],
)
def test_programs_at_once(registers: int, shared: int, expected: int) -> None:
    """As computed by NVIDIA's occupancy calculator: 64 Ki registers, 228 KiB, 64 warps."""
    assert H200.programs_at_once(4, registers, shared) == expected


class TestSelection:
    @pytest.mark.skipif(not launch.interpreted(), reason="kernels are compiled here")
    @pytest.mark.parametrize(
        ("layer", "dtype", "reason"),
        [
            (spec(2, 1, 264), torch.float32, "head size 264"),
            (spec(65, 1, 64), torch.float32, "65 query heads per KV head"),
            (spec(4, 2, 64), torch.float64, "float64"),
            (spec(4, 2, 64, kv_cache_dtype=torch.int8), torch.bfloat16, "kv_cache_dtype='int8'"),
        ],
    )
    def test_unsupported_features_are_named(self, monkeypatch: pytest.MonkeyPatch, layer, dtype, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            select_backend("gpu", [layer], dtype, 16, CPU)

    @pytest.mark.skipif(not launch.interpreted(), reason="kernels are compiled here")
    def test_fp8_requires_a_card_that_supports_it(self) -> None:
        layer = spec(4, 2, 64, kv_cache_dtype=torch.float8_e4m3fn)
        assert GpuAttention(H200).unsupported(layer, torch.bfloat16, 16) is None
        assert "compute capability 8.0" in (GpuAttention(A100).unsupported(layer, torch.bfloat16, 16) or "")

    def test_missing_requirements_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        monkeypatch.setattr(launch.shutil, "which", lambda name: None)
        assert "apt install gcc" in (launch.unavailable() or "")
        monkeypatch.setenv("CC", "gcc")
        assert launch.unavailable() == "compute capability 7.5 (supported: 8.0 and later)"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert launch.unavailable() is None


@pytest.mark.skipif(not launch.interpreted(), reason="kernels are compiled here")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_each_step_is_planned_once_per_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is prepared; attention then plans nothing."""
    plans = []
    monkeypatch.setattr(gpu_attention, "plan_splits", lambda *args: plans.append(args) or plan_splits(*args))
    case = PagedCase(spec(2, 1, 16), [20], [1], 16)
    windowed = replace(case, spec=replace(case.spec, sliding_window=5))
    backend = GpuAttention(H200)
    layers = [(part, part.filled_cache(backend)) for part in (case, windowed, case)]
    for _ in range(2):
        plans.clear()
        batch = case.prepared(backend)
        assert len(plans) == 2
        for layer, cache in layers:
            backend.attend(layer.query, cache, batch, layer.spec, None)
        assert len(plans) == 2


@pytest.mark.skipif(not launch.interpreted(), reason="kernels are compiled here")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_queries_of_another_dtype_than_the_models_are_planned_when_they_come() -> None:
    case = PagedCase(spec(2, 1, 16), [20], [3], 16, torch.float16)
    backend = GpuAttention(H200)
    cache, expected = case.filled_cache(backend), case.run(ReferenceAttention())
    out = backend.attend(case.query.float(), cache, case.prepared(backend), case.spec, None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected.float(), rtol=2e-3, atol=2e-3)
