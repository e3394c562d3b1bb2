"""The GitHub workflows run `.ci/run` for each change and `make test-all` every night."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()}
_SPEC = importlib.util.spec_from_file_location("nightly_for_change", ROOT / ".ci" / "nightly_for_change.py")
assert _SPEC and _SPEC.loader
nightly_for_change: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(nightly_for_change)


@pytest.mark.parametrize(
    ("name", "events", "minutes", "command"),
    [("ci", {"push", "pull_request"}, 90, ".ci/run"), ("nightly", {"schedule"}, 360, "make test-all")],
)
def test_a_workflow_runs_its_command_within_a_time_limit(
    name: str, events: set[str], minutes: int, command: str
) -> None:
    workflow = WORKFLOWS[name]
    assert events <= set(workflow[True]), "YAML reads the key `on` as true"
    (job,) = workflow["jobs"].values()
    assert job["runs-on"].startswith("ubuntu-")
    assert 0 < job["timeout-minutes"] <= minutes
    assert [step["run"] for step in job["steps"] if "run" in step] == [command]
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions), "pinned to a major version"
    assert workflow["permissions"] == {"contents": "read"}


def test_ci_can_be_executed_and_follows_the_change() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (job,) = WORKFLOWS["ci"]["jobs"].values()
    assert job["steps"][0]["with"]["fetch-depth"] == 0


def test_every_nightly_test_belongs_to_a_room() -> None:
    rooms: dict[str, list[str]] = nightly_for_change.ROOMS
    paths = {path for tests in rooms.values() for path in tests}
    assert all((ROOT / path).exists() for path in (*rooms, *paths))
    lost = [path for path in nightly_for_change.marked() if not path.startswith(tuple(paths))]
    assert not lost, "name a room for them in .ci/nightly_for_change.py"


def test_a_change_runs_the_nightly_tests_of_its_rooms_and_of_changed_files() -> None:
    files_for, gpu = nightly_for_change.files_for, "tests/bench/test_bench_gpu.py"
    assert files_for(["CHANGELOG.md", "tests/client/gone/test_x.py"]) == []
    assert gpu in files_for(["bench/gpu.py"]) and all(
        path.startswith("tests/bench/") for path in files_for(["bench/a"])
    )
    assert files_for([gpu]) == [gpu]
    assert files_for([f"{room}a.py" for room in nightly_for_change.ROOMS]) == [], "too much for one run"
