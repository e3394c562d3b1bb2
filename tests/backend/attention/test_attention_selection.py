"""Which kernel "auto" selects, and what is logged if it is not the best one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight.attention.base import LayerSpec
from inflight.config import ConfigError
from inflight.kernels.cpu import build, library
from inflight.kernels.gpu import launch
from inflight.kernels.registry import select_attention

SPEC = LayerSpec(4, 2, 64, 64, 0.125)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
class TestWithTheCompiledKernel:
    def test_auto_selects_it_silently(self, caplog: pytest.LogCaptureFixture) -> None:
        assert select_attention("auto", [SPEC], torch.bfloat16, 16, CPU).name == "cpu"
        assert not caplog.records

    @pytest.mark.parametrize(
        ("change", "dtype", "reason"),
        [
            (dict(key_head_size=12), torch.float32, "head size 12"),
            (dict(value_head_size=2048), torch.float32, "head size 2048"),
            (dict(scaling=-1.0), torch.float32, "scaling=-1.0"),
            ({}, torch.float64, "dtype=float64"),
        ],
    )
    def test_unsupported_features_are_named(
        self, caplog: pytest.LogCaptureFixture, change: dict, dtype: torch.dtype, reason: str
    ) -> None:
        specs = [SPEC, replace(SPEC, **change)]
        with pytest.raises(ConfigError, match=reason):
            select_attention("cpu", specs, dtype, 16, CPU)
        assert select_attention("auto", specs, dtype, 16, CPU).name == "reference"
        assert reason in caplog.text


@pytest.mark.usefixtures("no_library")
class TestWithoutTheCompiledKernel:
    def test_auto_falls_back_and_logs_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            assert select_attention("auto", [SPEC] * 3, torch.float32, 16, CPU).name == "reference"
        assert len(caplog.records) == 1
        line = caplog.records[0].getMessage()
        assert "apt install g++" in line and "inflight.kernels.cpu.build" in line and "slower" in line

    def test_selecting_it_by_name_is_rejected(self) -> None:
        with pytest.raises(ConfigError, match=r"apt install g\+\+"):
            select_attention("cpu", [SPEC], torch.float32, 16, CPU)


def test_unknown_names_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="attention_backend='xla' is not one of auto, reference, cpu, gpu, flash3"):
        select_attention("xla", [SPEC], torch.float32, 16, CPU)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_removed_kernel_is_refused_with_the_way_out(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"'flashinfer' was removed: .* CUDA graph .*; use 'auto', or 'flash3'"):
        select_attention("flashinfer", [SPEC], torch.bfloat16, 16, device)


def test_the_cpu_kernel_is_rejected_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="runs on a CPU, not on cuda"):
        select_attention("cpu", [SPEC], torch.float32, 16, CUDA)


@pytest.mark.parametrize("name", ["gpu", "triton", "flash3"])
def test_gpu_kernels_are_rejected_on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="runs on a CUDA device, not on cpu"):
        select_attention(name, [SPEC], torch.float32, 16, CPU)


@pytest.mark.skipif(not launch.interpreted(), reason="kernels are compiled here")
def test_triton_is_an_older_name_of_the_gpu_kernel() -> None:
    pytest.importorskip("triton")
    for name in ("gpu", "triton"):
        assert select_attention(name, [SPEC], torch.float32, 16, CPU).name == "gpu"


def test_a_gpu_without_the_package_gets_the_reference_and_one_line(monkeypatch, caplog) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert select_attention("auto", [SPEC] * 3, torch.bfloat16, 16, CUDA).name == "reference"
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert "pip install 'triton" in line and "one by one" in line
