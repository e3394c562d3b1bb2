"""The tests of the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing")
def test_nothing_is_read_or_written_beyond_its_bounds() -> None:
    """Products of codes, attention, the sampler and the layers of quantized checkpoints, by every instruction set."""
    found = subprocess.run([str(ROOT / ".ci/sanitize"), sys.executable], capture_output=True, text=True)
    if "install it" in found.stderr:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]
    assert " passed" in found.stdout
