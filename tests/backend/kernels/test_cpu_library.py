"""Loading the compiled library: a library of another version or for another machine, and OpenMP."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.kernels.cpu import build, library


@pytest.fixture
def fresh_load() -> Iterator[None]:
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("fresh_load")
class TestAnotherLibrary:
    """The library found after an update."""

    @pytest.mark.skipif(not build.LIBRARY.exists(), reason="no compiled library")
    def test_another_version_is_rejected_without_a_compiler(self, monkeypatch, tmp_path: Path) -> None:
        monkeypatch.setattr(library, "ABI", -1)
        monkeypatch.setattr(build, "is_current", lambda: False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        reason = library.unavailable() or ""
        assert "of another version" in reason and "apt install g++" in reason
        with pytest.raises(RuntimeError, match="of another version"):
            library.library()

    @pytest.mark.skipif(not build.LIBRARY.exists() or not shutil.which("gcc"), reason="no library or no C compiler")
    @pytest.mark.parametrize("source", ["int inflight_abi(void) { return -1; }", "int other(void) { return 4; }"])
    def test_another_version_is_compiled_again(self, monkeypatch, tmp_path: Path, caplog, source: str) -> None:
        """The old library has been loaded to find its version; the new one has the same path."""
        real, path = build.LIBRARY, tmp_path / "library.so"
        (tmp_path / "old.c").write_text(source)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, tmp_path / "old.c"], check=True)

        def compile_it(announce: Callable[[], None]) -> None:
            announce()
            shutil.copy(real, tmp_path / "new.so")
            (tmp_path / "new.so").replace(path)

        monkeypatch.setattr(build, "LIBRARY", path)
        monkeypatch.setattr(build, "build", compile_it)
        assert library.unavailable() is None
        assert library.instruction_set()
        assert "compiling the CPU kernels" in caplog.text

    @pytest.mark.skipif(not build.LIBRARY.exists(), reason="no compiled library")
    def test_one_of_other_sources_is_used_with_a_warning(self, monkeypatch, caplog) -> None:
        monkeypatch.setattr(build, "is_current", lambda: False)
        assert library.unavailable() is None
        assert "do not match their sources; run `python -m inflight.kernels.cpu.build`" in caplog.text

    def test_one_that_cannot_be_loaded_is_rejected_with_the_reason(self, monkeypatch, tmp_path: Path) -> None:
        path = tmp_path / "library.so"
        path.write_text("no library")
        monkeypatch.setattr(build, "LIBRARY", path)
        monkeypatch.setenv("CXX", "/nowhere/g++")
        reason = library.unavailable() or ""
        assert "cannot be loaded on this machine" in reason and "/nowhere/g++" in reason


def test_no_signature_changes_without_the_version() -> None:
    """A library of other signatures would be called with arguments in the wrong places."""
    signatures = {
        name: ([argument.__name__ for argument in arguments], result and result.__name__)
        for name, (arguments, result) in library._SIGNATURES.items()
    }
    digest = hashlib.blake2b(repr(signatures).encode(), digest_size=4).hexdigest()
    assert (library.ABI, digest) == (14, "3bfdbdde"), "raise ABI and `inflight_abi`, and put both numbers here"


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
def test_the_library_uses_torchs_openmp_runtime() -> None:
    """A second runtime would start threads that compete with torch's for the cores."""
    script = """
import os, torch
from paged_case import PagedCase
from inflight.attention.base import LayerSpec
from inflight.kernels.cpu.cpu_attention import CpuAttention
torch.set_num_threads(2)
case = PagedCase(LayerSpec(8, 2, 64, 64, 0.125), [3000, 3000], [1, 100], 16)
backend = CpuAttention()
cache = case.filled_cache(backend)
torch.ones(10**7).sum()
before = len(os.listdir("/proc/self/task"))
backend.attend(case.query, cache, case.prepared(backend), case.spec, None)
print(len(os.listdir("/proc/self/task")) - before)
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(sum("gomp" in path or "libomp" in path or "iomp5" in path for path in maps))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    new_threads, runtimes = done.stdout.split()
    assert (new_threads, runtimes) == ("0", "1")
