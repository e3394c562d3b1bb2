"""The GitHub workflow runs what `.ci/run` runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def test_pushes_and_pull_requests_run_the_checks_within_a_time_limit():
    assert {"push", "pull_request"} <= set(WORKFLOW[True]), "YAML reads the key `on` as true"
    (job,) = WORKFLOW["jobs"].values()
    assert job["runs-on"].startswith("ubuntu-")
    assert 0 < job["timeout-minutes"] <= 90
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_actions_are_pinned_to_a_major_version_and_only_read():
    (job,) = WORKFLOW["jobs"].values()
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions), actions
    assert WORKFLOW["permissions"] == {"contents": "read"}
