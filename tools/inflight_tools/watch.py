"""Notices that a server which was ready has died, or that one of its stubs has died or hangs.

Triton 24.10 restarts no stub, and reports "ready" after the death of one, or while one is stopped, though its streams
hang.  Everything else that can go wrong with a server (it hangs, it must be started again) is the business of a
service manager.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from inflight.frontend.lifecycle.instance_registry import states_of
from inflight.frontend.lifecycle.stub_beat import STUB_TIMEOUT
from inflight_tools.processes import STUB_NAME, children, end_of, how_it_ended

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

__all__ = ["Silence", "wait_for_death"]

_LOOK_SECONDS = 0.1
_SCAN_SECONDS = 0.5  # between two searches for new stubs
# An unloaded stub is a zombie until the server reaps it, and so is a stub that the server kills because its model
# failed to load.  A stub that the server does not reap was lost.
_CONFIRM_SECONDS = 0.2
_CONFIRM_EXIT_SECONDS = 2.0  # after exit status 0


class Silence:
    """How long each stub has shown no sign of life.  Without I/O.

    A stub without beats is another backend's, or still loads its model.  Gaps between two looks do not count: the
    machine was asleep, or this process was stopped.
    """

    def __init__(self) -> None:
        self._beats: dict[int, list[int]] = {}
        self._silent: dict[int, float] = {}
        self._looked = 0.0

    def look(self, now: float, beats: dict[int, list[int]]) -> dict[int, float]:
        """Take in what was seen.

        Args:
            now: seconds.
            beats: process id of each stub -> the beats of its model instances, in any order.

        Returns:
            Process id -> seconds of silence.
        """
        passed, self._looked = min(now - self._looked, 2 * _SCAN_SECONDS), now
        self._silent = {
            pid: self._silent.get(pid, 0.0) + passed if seen and seen == self._beats.get(pid) else 0.0
            for pid, seen in beats.items()
        }
        self._beats = beats
        return self._silent


def wait_for_death(
    server: TritonServer, check: Callable[[], None] = lambda: None, stub_timeout: float | None = STUB_TIMEOUT
) -> str:
    """Block until a running server or one of its stubs has died, or a stub hangs.

    Args:
        server: a server that has been started.
        check: called ten times a second; an exception that it raises ends the wait.
        stub_timeout: seconds without a sign of life after which a stub hangs; None: never.

    Returns:
        One line: which process died, and by which signal or exit status, or which one hangs.
    """
    assert server.process is not None
    stubs: dict[int, str] = {}  # the model of each stub, by process id
    dead_for: dict[int, float] = {}  # seconds; a gap between two looks is one in which the server did not run either
    silence = Silence()
    looked = scanned = float("-inf")
    while True:
        check()
        returncode = server.process.poll()
        if returncode is not None:
            return f"tritonserver died ({how_it_ended(returncode)})"
        now = time.monotonic()
        passed, looked = min(now - looked, _LOOK_SECONDS), now
        if now - scanned >= _SCAN_SECONDS:
            scanned = now
            stubs = {pid: stubs.get(pid) or _model_of(pid) for pid in children(server.process.pid, STUB_NAME)}
            silent = silence.look(now, {pid: [entry.beats for entry in states_of(pid)] for pid in stubs})
            for pid, seconds in silent.items():
                if stub_timeout is not None and seconds >= stub_timeout:
                    return f"the stub process of {_whose(stubs[pid])} hangs (no sign of life for {seconds:.0f} s)"
        for pid, model in stubs.items():
            ended = end_of(pid)
            if ended is None:
                dead_for.pop(pid, None)
                continue
            dead_for[pid] = dead_for[pid] + passed if pid in dead_for else 0.0
            if dead_for[pid] >= (_CONFIRM_SECONDS if ended else _CONFIRM_EXIT_SECONDS):
                how = how_it_ended(os.waitstatus_to_exitcode(ended))
                return f"the stub process of {_whose(model)} died ({how}), and its streams would hang"
        time.sleep(_LOOK_SECONDS)


def _whose(model: str) -> str:
    return f"model '{model}'" if model else "a model"


def _model_of(stub: int) -> str:
    """The model of a living stub, from its command line, which names `<model>/<version>/model.py`; else ""."""
    with contextlib.suppress(psutil.Error):
        for argument in psutil.Process(stub).cmdline():
            path = Path(argument)
            if path.name == "model.py" and len(path.parts) > 3:
                return path.parts[-3]
    return ""
