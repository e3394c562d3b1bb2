"""The stage `tests` of bench/gpu.py: how it starts pytest, and what it makes of the output."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_tests
import pytest
from gpu_rows import Run

PLAIN = """\
collecting ... collected 10 items / 1 skipped

tests/gpu/test_a.py::test_ok PASSED                                      [ 10%]
tests/gpu/test_a.py::test_bad[a b] FAILED                                [ 20%]
tests/gpu/test_a.py::test_skipped SKIPPED (why)                          [ 40%]
tests/gpu/test_a.py::test_expected XFAIL (no)                            [ 60%]
tests/gpu/test_c.py::TestC::test_teardown PASSED                         [ 90%]
tests/gpu/test_c.py::TestC::test_teardown ERROR                          [100%]
SKIPPED [1] tests/gpu/test_b.py:2: needs a GPU
SKIPPED [1] tests/gpu/test_a.py:5: why
FAILED tests/gpu/test_a.py::test_bad[a b] - AssertionError: assert 'a b' == 'c'
"""
XDIST = """\
2 workers [11 items]
tests/gpu/test_a.py::test_ok 
tests/gpu/test_c.py::TestC::test_teardown 
[gw1] [  9%] PASSED tests/gpu/test_c.py::TestC::test_teardown 
[gw1] [ 18%] ERROR tests/gpu/test_c.py::TestC::test_teardown 
[gw0] [ 27%] PASSED tests/gpu/test_a.py::test_ok 
[gw0] [ 36%] FAILED tests/gpu/test_a.py::test_bad[a b] 
[gw0] node down: Not properly terminated
[gw0] [ 36%] FAILED tests/gpu/test_a.py::test_bad[a b] 
[gw0] [ 54%] SKIPPED tests/gpu/test_a.py::test_skipped 
[gw0] [100%] XFAIL tests/gpu/test_a.py::test_expected 
SKIPPED [7] tests/gpu/test_b.py:2: needs a GPU
FAILED tests/gpu/test_a.py::test_bad[a b] - worker 'gw0' crashed while running '...
"""


@pytest.mark.parametrize("output", [PLAIN, XDIST], ids=["plain", "xdist"])
def test_rows_of_failed_tests_and_of_files(output: str) -> None:
    rows = list(gpu_tests.pytest_rows(output.splitlines(keepends=True)))
    failed = {row["shape"] for row in rows if row["name"] == "test"}
    assert failed == {"tests/gpu/test_a.py::test_bad[a b]", "tests/gpu/test_c.py::TestC::test_teardown"}
    assert len([row for row in rows if row["name"] == "test"]) == 2, "a test that fails twice has one row"
    files = {row["shape"]: row for row in rows if row["name"] == "tests"}
    assert [files["tests/gpu/test_a.py"][key] for key in ("achieved", "limit", "passed", "note")] == [
        1, 2, False, "1 skipped",
    ]  # fmt: skip
    assert not files["tests/gpu/test_c.py"]["passed"]
    assert files["tests/gpu/test_b.py"]["why"] == "needs a GPU"
    assert len(files) == 3


def test_a_file_whose_tests_are_all_deselected_has_a_row_too() -> None:
    """As tests/gpu/test_gpu_kv_tiers.py on an emulated card, where its only test is nightly."""
    rows = gpu_tests.pytest_rows(PLAIN.splitlines(keepends=True))
    found = list(gpu_tests.with_every_file(rows, [f"tests/gpu/test_{name}.py" for name in "abcd"]))
    assert [row["shape"] for row in found if row["name"] == "tests"] == [
        *(f"tests/gpu/test_{name}.py" for name in "acbd"),
    ]
    assert found[-1]["status"] == "left out" and found[-1]["why"].startswith("none of its tests ran")


def test_processes_and_threads_fit_the_cores() -> None:
    (together, threads), (alone, all_threads) = gpu_tests.commands(cores=16, has_xdist=True)
    assert together[together.index("-n") + 1] == "7" and threads == 2
    assert f"--ignore={gpu_tests.ALONE}" in together
    assert alone[-1] == gpu_tests.ALONE and "-n" not in alone and all_threads == 8
    for cores, has_xdist in ((16, False), (1, True)):
        ((serial, _),) = gpu_tests.commands(cores, has_xdist)
        assert serial[-1] == "tests/gpu" and "-n" not in serial


def test_a_machine_without_xdist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row each for the missing plugin and for the tests that did not end in time."""
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)
    monkeypatch.setattr(
        gpu_tests, "commands", lambda cores, has_xdist: [([sys.executable, "-c", "import time; time.sleep(60)"], 1)]
    )
    run = Run("cpu", True, 0.0, tmp_path / "rows")
    missing, rest, *files = gpu_tests.tests(run)
    assert missing["why"] == "pytest-xdist is not installed: the tests run one after another"
    assert rest["why"] == "the rest: no time left"
    assert len(files) == len(list(gpu_tests.FOLDER.glob("test_*.py"))), "a row for each that did not run"
