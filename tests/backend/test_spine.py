"""The reading list of docs/architecture.md: its files exist, they fit an hour's reading, and so does what they import.

`pytest tests/backend/test_spine.py -s` prints the figures.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from source_tree import source_tree

BACKEND = Path(__file__).parents[2] / "backend"
DOCS = Path(__file__).parents[2] / "docs"
MAX_LINES = 1800
MAX_SCHEDULER_LINES = 399
# Modules and everything of ours that they import, themselves included.
MAX_CLOSURE_LINES = {"inflight.engine.scheduler": 2300, "inflight.engine.core": 6000}
# The engine with the answer of every policy: not a budget that was given, but what it takes today.
MAX_ASSEMBLY_LINES = 8880


def reading_list() -> list[Path]:
    """The files that the numbered list under "The spine" links to, in order."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## The spine\n")[1].split("\n## ")[0]
    links = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\)", section, re.MULTILINE)
    return [(DOCS / link).resolve() for link in links]


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def file_of(module: str) -> Path:
    path = BACKEND / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports_of(module: str) -> set[str]:
    """Modules of ours that it imports anywhere; not for type checking alone."""
    found = set()
    for node in ast.walk(source_tree(file_of(module))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("inflight"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if file_of(name).exists() else node.module for name in names}
    return found


def closure(module: str) -> dict[str, int]:
    """Lines of the module and of all that it imports, directly or not."""
    found: dict[str, int] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = lines_of(file_of(name))
            waiting += imports_of(name)
    return found


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


def test_the_spine_has_at_most_eighteen_hundred_lines() -> None:
    lines = {path.name: lines_of(path) for path in reading_list()}
    print(f"\nspine: {sum(lines.values())} of {MAX_LINES} lines: {lines}")
    assert sum(lines.values()) <= MAX_LINES, f"{sum(lines.values())} lines: {lines}"
    assert lines["scheduler.py"] <= MAX_SCHEDULER_LINES


def test_what_the_spine_imports_has_a_limit_too() -> None:
    """Moving logic of the spine to a file next to it gains nothing."""
    for module, limit in {**MAX_CLOSURE_LINES, "inflight.engine.assembly": MAX_ASSEMBLY_LINES}.items():
        lines = closure(module)
        print(f"\nclosure of {module}: {sum(lines.values())} of {limit} lines in {len(lines)} files")
        largest = sorted(lines.items(), key=lambda item: -item[1])[:15]
        assert sum(lines.values()) <= limit, f"{sum(lines.values())} lines; the largest: {largest}"
