"""`make test` hands out whole files, the longest first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from whole_files import LONGEST, WholeFiles

ROOT = Path(__file__).parents[1]


class Worker:
    """Records the tests that it is told to run, by their places in the collection."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.told: list[list[int]] = []

    def send_runtest_some(self, places: list[int]) -> None:
        self.told.append(places)

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_worker_takes_a_group_or_a_file_at_a_time_and_the_longest_first() -> None:
    long = next(name for name in LONGEST if name.endswith(".py"))
    tests = [
        "tests/a.py::test_one",
        "tests/a.py::TestClass::test_two[x@y]",
        "tests/b.py::test_three@a group",
        f"{long}::test_four",
        "tests/c.py::test_five@a group",
        "tests/a.py::test_six",
    ]
    option = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(getvalue={"tx": ["popen", "popen"]}.get, option=option, rootpath=ROOT)
    schedule = WholeFiles(config)
    workers: list[Any] = [Worker("first"), Worker("second")]
    for worker in workers:
        schedule.add_node(worker)
    for worker in workers:
        schedule.add_node_collection(worker, tests)
    schedule.schedule()
    assert workers[0].told[0] == [3]
    assert sorted(places for worker in workers for places in worker.told) == [[0, 1, 5], [2, 4], [3]]


def test_the_longest_files_exist() -> None:
    assert all((ROOT / name).is_file() for name in LONGEST if "/" in name)
