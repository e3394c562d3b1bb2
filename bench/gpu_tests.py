"""Stage `tests`: tests/gpu in several processes, which compile and wait side by side; the tests of memory alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import Any

from gpu_rows import Run

__all__ = ["ALONE", "commands", "pytest_rows", "tests", "with_every_file"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "gpu"
ALONE = "tests/gpu/test_gpu_memory.py"  # judges by the card's free memory, which others change
_PROCESSES = 7

# "[gw0] [ 27%] PASSED file::test" of pytest-xdist, "file::test PASSED [ 27%]" without it.
_RESULTS = (
    re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<result>[A-Z]+) (?P<file>tests/gpu/\S+\.py)::(?P<test>.+?) *$"),
    re.compile(r"^(?P<file>tests/gpu/\S+\.py)::(?P<test>.+?) (?P<result>[A-Z]+)\b"),
)
_SKIPPED_FILE = re.compile(r"^SKIPPED \[\d+\] (?P<file>tests/gpu/\S+\.py):\d+: (?P<why>.+)$")
_COUNTED = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def commands(cores: int, has_xdist: bool) -> list[tuple[list[str], int]]:
    """pytest's command lines, one after another, and the threads of each process.

    `--dist worksteal` and not `loadfile`, which runs a test that kills its process again and again.
    """
    base = [sys.executable, "-u", "-m", "pytest", "-v", "-rs", "--color=no", "-p", "no:cacheprovider"]
    base += ["-m", "not nightly"]  # on an emulated card; on a real one no test is nightly
    processes = min(_PROCESSES, cores)
    if not has_xdist or processes == 1:
        return [([*base, "tests/gpu"], min(8, cores))]
    together = [*base, "tests/gpu", f"--ignore={ALONE}", "-n", str(processes), "--dist", "worksteal"]
    return [(together, max(1, cores // processes)), ([*base, ALONE], min(8, cores))]


def tests(run: Run) -> Iterator[dict[str, Any]]:
    """A row per failed test as it fails, and one per file of tests/gpu."""
    has_xdist = find_spec("xdist") is not None
    if not has_xdist:
        why = "pytest-xdist is not installed: the tests run one after another"
        yield dict(name="tests", shape=f"{_PROCESSES} processes", status="left out", why=why)
    rows = [_run(run, command, threads) for command, threads in commands(len(os.sched_getaffinity(0)), has_xdist)]
    yield from with_every_file(
        chain.from_iterable(rows), [f"tests/gpu/{path.name}" for path in FOLDER.glob("test_*.py")]
    )


def with_every_file(rows: Iterable[dict[str, Any]], files: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows, and one for each file that has none."""
    shown = set()
    for row in rows:
        shown.add(row["shape"])
        yield row
    for file in sorted(set(files) - shown):
        why = "none of its tests ran: on an emulated card all are nightly, on a real one the time was over"
        yield dict(name="tests", shape=file, status="left out", why=why)


def _run(run: Run, command: list[str], threads: int) -> Iterator[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # Not stderr: the processes of xdist write to it, and a pipe that they have open would outlive pytest.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    timer = Timer(max(0.0, run.seconds_left), process.kill)
    timer.start()
    yield from pytest_rows(process.stdout)
    timer.cancel()
    if process.wait() < 0:
        yield dict(name="tests", shape=command[-1], status="left out", why="the rest: no time left")
    elif process.returncode not in (0, 1, 5):  # 5: all files were skipped
        raise RuntimeError(f"pytest: exit status {process.returncode}; see its output")


def pytest_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows that pytest's verbose output amounts to; the output is also printed."""
    counts: dict[str, dict[str, int]] = {}
    failed: set[str] = set()
    skipped: dict[str, str] = {}  # files
    for text in lines:
        print(text, end="", flush=True)
        if found := _SKIPPED_FILE.match(text):
            skipped[found["file"]] = found["why"]
            continue
        found = next(filter(None, (pattern.match(text) for pattern in _RESULTS)), None)
        if found is None or found["result"] not in _COUNTED:
            continue
        name = f"{found['file']}::{found['test']}"
        bad = found["result"] in ("FAILED", "ERROR")
        if bad and name in failed:  # its teardown, too, or its process, which xdist reports again
            continue
        counts.setdefault(found["file"], dict.fromkeys(_COUNTED, 0))[found["result"]] += 1
        if bad:
            failed.add(name)
            yield dict(name="test", shape=name, achieved=0, limit=1, unit="tests", passed=False)
    for file, count in counts.items():
        bad_ones, note = count["FAILED"] + count["ERROR"], f"{count['SKIPPED']} skipped" if count["SKIPPED"] else None
        yield dict(name="tests", shape=file, achieved=count["PASSED"], limit=count["PASSED"] + bad_ones, unit="tests",
                   passed=not bad_ones, note=note)  # fmt: skip
    for file in skipped.keys() - counts.keys():
        yield dict(name="tests", shape=file, status="left out", why=skipped[file])
