"""The parts of a fork server that its engine processes do not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inflight import fork_server
from inflight.fork_server import ForkRequest


def test_an_open_device_forbids_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidiactl"
    monkeypatch.setattr(fork_server, "_DEVICES", (str(tmp_path),))
    assert fork_server._open_device() is None
    with device.open("w"):
        assert fork_server._open_device() == str(device)
    assert fork_server._open_device() is None


@pytest.mark.parametrize(
    ("program", "seconds", "obstacle"),
    [("import numpy", 60, "None"), ("start()", 0.3, "the imports have started threads: waits")],
)
def test_only_threads_that_outlast_a_fork_forbid_it(program: str, seconds: float, obstacle: str) -> None:
    """numpy's BLAS starts some on import and ends them before a fork."""
    lines = (
        "import ctypes, threading, time",
        "from inflight import fork_server",
        f"fork_server._THREADS_END_SECONDS = {seconds}",
        "named = threading.Event()",
        "def wait(): ctypes.CDLL(None).prctl(15, b'waits', 0, 0, 0); named.set(); time.sleep(60)",
        "def start(): threading.Thread(target=wait, daemon=True).start(); named.wait()",
        program,
        "print(fork_server._obstacle())",
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == obstacle


def test_each_fork_draws_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_end_with", lambda owner: None)
    drawn = []
    for _ in range(2):
        np.random.seed(1)
        fork_server._become_engine(ForkRequest(-1, -1, -1, -1), None)
        drawn.append(np.random.random())
    assert drawn[0] != drawn[1]
