"""Processes of a server: its children, and how they died."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from inflight_tools.sweeper import session_members

__all__ = ["STUB_NAME", "children", "end_of", "how_it_ended", "session_members"]

STUB_NAME = "triton_python"  # of Triton's stub; /proc cuts names off after 15 characters

_STATE, _EXIT_CODE = 0, 49  # fields 3 and 52 of /proc/PID/stat, counted behind the name


def children(parent: int, name: str) -> list[int]:
    """Process ids of the children of `parent` whose name starts with `name`, including zombies."""
    found = []
    for pid in _child_pids(parent):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if _stat(pid)[0].startswith(name):
                found.append(pid)
    return found


def _child_pids(parent: int) -> list[int]:
    found: list[int] = []
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):  # a kernel without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(parent).children()]
        return found
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            found += map(int, task.read_text().split())
    return found


def end_of(pid: int) -> int | None:
    """The wait status of a zombie, as `waitpid` reports it; None if the process runs or is gone."""
    with contextlib.suppress(OSError):
        _, fields = _stat(pid)
        if fields[_STATE] == "Z":
            return int(fields[_EXIT_CODE])
    return None


def _stat(pid: int) -> tuple[str, list[str]]:
    """The name of a process and what follows it in /proc/PID/stat."""
    before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return before.partition("(")[2], after.split()


def how_it_ended(returncode: int) -> str:
    """An exit status as `subprocess` reports it (negative: a signal), in words."""
    if returncode >= 0:
        return f"exit status {returncode}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"
