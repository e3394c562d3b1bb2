"""bench/gpu.py itself, with tiny shapes in the Triton language's interpreter: it runs, and its checks pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
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
        "rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "sampling", "attention",
    }  # fmt: skip
    assert all(row["passed"] for row in checked)
    assert "checks passed" in done.stdout


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            dict(name="attention", shape="prefill 8K", error=1e-3, microseconds=1250.0, achieved=5e14, limit=7.5e14,
                 ratio=0.667, unit="FLOP/s", over_flash=1.04, target=1.0, passed=True),
            ["prefill 8K", "1250.0 us", "500.0 of    750.0 TFLOP/s", "0.67", "1.04 x torch's flash", "target 1 met"],
        ),
        (
            dict(name="attention", shape="mix", error=1e-3, microseconds=900.0, achieved=0.9, limit=0.6, ratio=1.5,
                 unit="ms", target=1.2, passed=False),
            ["900.0 us", "0.9 of      0.6 ms", "1.50", "target 1.2 MISSED"],
        ),
        (
            dict(name="attention is right", shape="mix, float16", error=2e-3, achieved=2e-3, limit=1e-3, ratio=2.0,
                 unit="error", passed=False),
            ["2.0e-03 of 1.0e-03 allowed", "MISSED"],
        ),
        (
            dict(name="rms_norm", shape="64 x 4096", microseconds=2.5, achieved=3e12, limit=4e12, ratio=0.75,
                 unit="bytes/s", over_torch=3.14),
            ["2.5 us", "3000.0 of   4000.0 GB/s", "0.75", "3.1 x torch"],
        ),
    ],
    ids=["flops", "milliseconds", "error", "bytes"],
)  # fmt: skip
def test_a_line_of_the_table(row: dict[str, Any], expected: list[str]) -> None:
    """Rows of attention, too, which only a GPU can measure."""
    for text in expected:
        assert text in gpu.line(row)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "kernels"])
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    assert gpu.main() == 2
    assert "--device cpu" in capsys.readouterr().err


def test_a_failed_check_is_the_exit_status(tmp_path: Path) -> None:
    """The kernel under test is broken on purpose."""
    script = (
        "import sys, gpu, gpu_attention, gpu_ops\n"
        "gpu_ops.sampling_check_rows = gpu_ops.timed_rows = gpu_ops.sampling_rows = lambda *_: []\n"
        "gpu_attention.run = lambda *_: []\n"
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
