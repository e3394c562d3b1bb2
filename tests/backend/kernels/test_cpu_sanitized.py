"""The tests of the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.kernels.cpu.library import library

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="only .ci/sanitize preloads libasan")
def test_the_library_that_tests_load_is_instrumented() -> None:
    content = Path(library()._name).read_bytes()
    assert b"__asan_init" in content and b"__ubsan_handle" in content


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing")
def test_nothing_is_read_or_written_beyond_its_bounds() -> None:
    """Products of codes, attention, the sampler and the layers of quantized checkpoints, by every instruction set."""
    found = subprocess.run([str(ROOT / ".ci/sanitize"), sys.executable], capture_output=True, text=True)
    if "install it" in found.stderr:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]
    assert " passed" in found.stdout and "test_cpu_sanitized" not in found.stdout, "skipped: nothing was instrumented"
