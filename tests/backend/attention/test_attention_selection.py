"""Which kernel "auto" takes, and what is said where it is not the best one."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from inflight.attention.base import LayerSpec
from inflight.config import ConfigError
from inflight.kernels.cpu import attention as cpu
from inflight.kernels.cpu import build, select_backend

SPEC = LayerSpec(4, 2, 64, 64, 0.125)
CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu._load.cache_clear()
    yield
    cpu._load.cache_clear()


@pytest.mark.skipif(cpu.unavailable() is not None, reason="no compiled kernel")
class TestWithTheKernel:
    def test_auto_takes_it_and_is_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        assert select_backend("auto", [SPEC], torch.bfloat16, 16, CPU).name == "cpu"
        assert not caplog.records

    @pytest.mark.parametrize(
        ("change", "dtype", "lack"),
        [
            (dict(key_head_size=12), torch.float32, "head size 12"),
            (dict(value_head_size=2048), torch.float32, "head size 2048"),
            (dict(scaling=-1.0), torch.float32, "scaling of -1.0"),
            ({}, torch.float64, "float64"),
        ],
    )
    def test_what_it_lacks_is_named(
        self, caplog: pytest.LogCaptureFixture, change: dict, dtype: torch.dtype, lack: str
    ) -> None:
        specs = [SPEC, replace(SPEC, **change)]
        with pytest.raises(ConfigError, match=lack):
            select_backend("cpu", specs, dtype, 16, CPU)
        assert select_backend("auto", specs, dtype, 16, CPU).name == "reference"
        assert lack in caplog.text

    def test_torch_brings_the_only_openmp_runtime(self) -> None:
        """A second one would bring threads that compete with torch's for the cores."""
        script = """
import os, torch
from paged_case import PagedCase
from inflight.attention.base import LayerSpec
from inflight.kernels.cpu.attention import CpuAttention
torch.set_num_threads(2)
case = PagedCase(LayerSpec(8, 2, 64, 64, 0.125), [3000, 3000], [1, 100], 16)
backend = CpuAttention()
cache = case.filled_cache(backend)
torch.ones(10**7).sum()
before = len(os.listdir("/proc/self/task"))
backend.attend(case.query, cache, case.metadata(case.counts), case.spec, None)
print(len(os.listdir("/proc/self/task")) - before)
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(sum("gomp" in path or "libomp" in path or "iomp5" in path for path in maps))
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        new_threads, runtimes = done.stdout.split()
        assert (new_threads, runtimes) == ("0", "1")


@pytest.mark.usefixtures("no_library")
class TestWithoutTheKernel:
    def test_auto_falls_back_with_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            assert select_backend("auto", [SPEC] * 3, torch.float32, 16, CPU).name == "reference"
        assert len(caplog.records) == 1
        line = caplog.records[0].getMessage()
        assert "apt install g++" in line and "inflight.kernels.cpu.build" in line and "slower" in line

    def test_asking_for_it_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"apt install g\+\+"):
            select_backend("cpu", [SPEC], torch.float32, 16, CPU)


@pytest.fixture
def fresh_load() -> Iterator[None]:
    cpu._load.cache_clear()
    yield
    cpu._load.cache_clear()


@pytest.mark.usefixtures("fresh_load")
class TestAnotherLibrary:
    """What is there at a load after an update."""

    def test_of_another_version_without_a_compiler_is_refused(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setattr(cpu, "_ABI", -1)
        monkeypatch.setattr(build, "is_current", lambda: False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        message = cpu.unavailable() or ""
        assert "this version's source" in message and "apt install g++" in message

    @pytest.mark.skipif(not build.LIBRARY.exists() or not shutil.which("gcc"), reason="no kernel or no C compiler")
    def test_of_another_version_is_compiled_again(self, monkeypatch, tmp_path, caplog) -> None:
        """The old one has been loaded to learn its version; the new one has the same path."""
        real, library = build.LIBRARY, tmp_path / "library.so"
        (tmp_path / "old.c").write_text("int inflight_attention_abi(void) { return -1; }")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "old.c"], check=True)

        def compile_it(announce: Callable[[], None]) -> None:
            announce()
            shutil.copy(real, tmp_path / "new.so")
            (tmp_path / "new.so").replace(library)

        monkeypatch.setattr(build, "LIBRARY", library)
        monkeypatch.setattr(build, "build", compile_it)
        assert cpu.unavailable() is None
        assert cpu.instruction_set()
        assert "compiling the CPU kernels" in caplog.text

    @pytest.mark.skipif(not build.LIBRARY.exists(), reason="no compiled kernel")
    def test_of_other_sources_serves_with_a_word(self, monkeypatch, caplog) -> None:
        monkeypatch.setattr(build, "is_current", lambda: False)
        assert cpu.unavailable() is None
        assert "inflight.kernels.cpu.build" in caplog.text

    def test_one_that_cannot_be_loaded_says_why(self, monkeypatch, tmp_path) -> None:
        library = tmp_path / "library.so"
        library.write_text("no library")
        monkeypatch.setattr(build, "LIBRARY", library)
        monkeypatch.setenv("CXX", "/nowhere/g++")
        message = cpu.unavailable() or ""
        assert "for this machine" in message and "/nowhere/g++" in message


def test_it_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="runs on a CPU"):
        select_backend("cpu", [SPEC], torch.float32, 16, torch.device("cuda"))
