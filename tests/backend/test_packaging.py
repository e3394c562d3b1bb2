"""What is written twice stays the same: the image's packages, the repository examples, the build files."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from inflight.config import EngineConfig
from inflight.repository import CONFIG_PBTXT

ROOT = Path(__file__).parents[2]


def _statements(pbtxt: str) -> list[str]:
    return [line for line in pbtxt.splitlines() if line and not line.startswith("#")]


def test_the_image_installs_what_the_backend_needs() -> None:
    asked = {Requirement(text) for text in re.findall(r'"([a-z0-9-]+>=[^"]+)"', (ROOT / "Dockerfile").read_text())}
    requirements = [Requirement(text) for text in importlib.metadata.requires("inflight") or []]
    needed = {
        Requirement(f"{requirement.name}{requirement.specifier}")
        for requirement in requirements
        if requirement.name == "msgspec" or "extra == 'backend'" in str(requirement.marker).replace('"', "'")
    }
    assert asked == needed


@pytest.mark.parametrize("name", ["demo", "template"])
def test_example_entries_load_and_match_what_the_command_line_writes(name: str) -> None:
    entry = ROOT / "model_repository" / name
    EngineConfig.from_file(entry / "1" / "model.json")
    assert _statements((entry / "config.pbtxt").read_text()) == _statements(CONFIG_PBTXT)


def test_make_finds_versions_in_pyproject() -> None:
    made = subprocess.run(["make", "-n", "run", "VENV=/nowhere/venv"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert re.search(r"whl/cpu 'torch>=[\d.]+,<[\d.]+'", made.stdout)
    assert re.search(r"--no-deps 'nvidia-pytriton==[\d.]+'", made.stdout)
    assert ".[backend,server]" in made.stdout


def test_make_without_a_usable_python_says_what_to_install() -> None:
    made = subprocess.run(["make", "run", "VENV=/nowhere/venv", "PYTHON="], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode != 0
    assert "no Python 3.10 to 3.13" in made.stderr
