"""bench/gpu.py itself, with tiny shapes in the Triton language's interpreter: it runs, and its checks pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_kernels(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "kernels", "--device", "cpu", "--quick"]
    environment = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gpu_kernels_cpu.json").read_text())
    assert set(record) >= {"command", "date", "card", "versions", "seconds", "rates", "rows"}
    assert set(record["rates"]) == {"copy", "gemm"}
    checked = [row for row in record["rows"] if row["unit"] in ("error", "tokens")]
    assert {row["name"].split()[0] for row in checked} == {
        "rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "sampling",
    }  # fmt: skip
    assert all(row["passed"] for row in checked)
    assert "checks passed" in done.stdout


def test_a_failed_check_is_the_exit_status(tmp_path: Path) -> None:
    """The kernel under test is broken on purpose."""
    script = (
        "import sys, gpu, gpu_ops, torch\n"
        "gpu_ops.sampling_check_rows = gpu_ops.timed_rows = gpu_ops.sampling_rows = lambda *_: []\n"
        "broken = {'silu_and_mul': lambda self, x: x[:, ::2] * 1.0}\n"
        "gpu_ops.KERNELS = type('Broken', (gpu_ops.ReferenceOps,), broken)()\n"
        "sys.argv = ['bench/gpu.py', 'kernels', '--device', 'cpu', '--quick']\n"
        "sys.exit(gpu.main())"
    )
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": f"{ROOT / 'bench'}{os.pathsep}{ROOT / 'backend'}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "silu_and_mul is right" in done.stdout
    assert "MISSED" in done.stdout
