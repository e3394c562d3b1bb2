"""The GPU benchmarks and the kernels' tests with the versions of a machine with a card (bench/card_environment.sh)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import gpu_stages
import pytest

ROOT = Path(__file__).parents[2]
CARD = Path(os.environ.get("INFLIGHT_CARD_ENV", ROOT / ".venv-card"))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (CARD / "card.stamp").exists(), reason=f"no environment in {CARD}: make card-env"),
]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The environment's Python, without what belongs to the tests' own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON"))}
    command = [str(CARD / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True)


def test_all_stages_with_toy_shapes(tmp_path: Path) -> None:
    done = run("bench/gpu.py", "all", "--device", "cpu", "--tiny", "--budget", "3000", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu_all_cpu.json").read_text())
    assert [(stage["stage"], stage["status"]) for stage in record["stages"]] == [
        (stage.name, "ok") for stage in gpu_stages.STAGES
    ]
    for package, version in (("torch", "2.11."), ("triton", "3.6."), ("transformers", "5.17.")):
        assert record["versions"][package].startswith(version)
    measured = {row["stage"] for row in record["rows"] if row.get("achieved", 0) > 0}
    assert measured >= {stage.name for stage in gpu_stages.STAGES}  # tests/gpu runs on the emulated card


def test_the_kernels_are_interpreted_and_compiled(tmp_path: Path) -> None:
    """With a cache of its own: pytest's has the reports of kernels that the other triton compiled."""
    cache = f"cache_dir={CARD / 'pytest_cache'}"
    done = run("-m", "pytest", "tests/backend/kernels", "-k", "gpu", "-q", "-n", "2", "-o", cache)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    assert " passed" in done.stdout
