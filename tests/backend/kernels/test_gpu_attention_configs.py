"""Tile shapes of the GPU attention kernel, and which layers it supports: arithmetic that needs no kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import spec
from paged_case import PagedCase

from inflight.attention.reference import ReferenceAttention
from inflight.config import ConfigError
from inflight.kernels.gpu import launch
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import Card, padded, tile_for
from inflight.kernels.registry import select_attention

H200, A100, L40S = Card((9, 0), 132, 227 * 1024), Card((8, 0), 108, 163 * 1024), Card((8, 9), 142, 99 * 1024)
CPU = torch.device("cpu")


@pytest.mark.parametrize("card", [H200, A100, L40S], ids=["H200", "A100", "L40S"])
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_head_size_has_tiles_that_fit(card: Card, size: int, dtype: torch.dtype) -> None:
    for is_decode in (True, False):
        tile = tile_for(card, spec(8, 2, size), dtype, is_decode)
        assert (tile.block_m == 0) == is_decode
        stage = 2 * tile.block_n * padded(size) * dtype.itemsize
        assert stage * max(1, tile.num_stages - 1) + tile.block_m * padded(size) * dtype.itemsize <= card.shared_memory


def test_values_are_late_where_wgmma_runs_beside_a_softmax() -> None:
    """On Hopper, in prompts, for 16-bit values that are read as they are."""
    layer, b200 = spec(8, 2, 128), Card((10, 0), 148, 227 * 1024)
    assert tile_for(H200, layer, torch.bfloat16, False).late
    assert not tile_for(H200, layer, torch.bfloat16, True).late
    assert not tile_for(H200, layer, torch.float32, False).late
    assert not tile_for(b200, layer, torch.bfloat16, False).late
    assert not tile_for(H200, replace(layer, kv_cache_dtype=torch.float8_e4m3fn), torch.bfloat16, False).late


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
            select_attention("gpu", [layer], dtype, 16, CPU)

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
def test_queries_of_another_dtype_than_the_models_are_planned_when_they_come() -> None:
    case = PagedCase(spec(2, 1, 16), [20], [3], 16, torch.float16)
    backend = GpuAttention(H200)
    cache, expected = case.filled_cache(backend), case.run(ReferenceAttention())
    out = backend.attend(case.query.float(), cache, case.prepared(backend), case.spec, None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected.float(), rtol=2e-3, atol=2e-3)
