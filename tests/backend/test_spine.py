"""The reading list of docs/architecture.md: its files exist, and together they stay within an hour's reading."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MAX_LINES = 2000


def reading_list() -> list[Path]:
    """The files that the numbered list under "The spine" links to, in order."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## The spine\n")[1].split("\n## ")[0]
    links = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\)", section, re.MULTILINE)
    return [(DOCS / link).resolve() for link in links]


def test_the_reading_list_names_the_spine_in_order() -> None:
    assert ["/".join(path.parts[-2:]) for path in reading_list()] == [
        "engine/core.py",
        "engine/scheduler.py",
        "engine/request.py",
        "engine/kv_pool.py",
        "engine/step.py",
        "runner/model_runner.py",
        "device/batch_state.py",
        "attention/base.py",
        "attention/reference.py",
        "sampling/sampler.py",
    ]


def test_the_spine_has_at_most_two_thousand_lines() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in reading_list()}
    assert sum(lines.values()) <= MAX_LINES, f"{sum(lines.values())} lines: {lines}"
