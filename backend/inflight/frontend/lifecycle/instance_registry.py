"""Publishes the state of a model instance to other processes of the machine.

An entry is a few bytes in an anonymous file that ends with its process; other processes find it among the open files
of Triton's stub processes (`/proc/PID/fd`).  Linux only, like Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["InstanceState", "RegistryEntry", "children_of", "states_of"]

_PREFIX = "inflight-state-"
_BYTES = 96


class InstanceState(NamedTuple):
    """An entry, as another process reads it.

    Attributes:
        name: equal for successive instances of the same model instance.
        started: creation, in seconds of `time.monotonic()`.
        beats: number of signs of life; one that does not grow belongs to an instance that sends nothing.
        state: "serving", "draining" or "drained".
    """

    name: str
    started: float
    beats: int
    state: str


class RegistryEntry:
    """This instance's entry.

    Args:
        instance: identifies a model instance of the server; a successor of this instance has the same name.
    """

    def __init__(self, instance: str) -> None:
        self.name = _PREFIX + hashlib.sha256(instance.encode()).hexdigest()[:16]
        self._started = time.monotonic()
        self._lock = threading.Lock()  # guards the descriptor: its number can be reused
        self._fd = os.memfd_create(self.name)
        self._beats = 0
        self._state = "serving"
        self._write()

    def set(self, state: str) -> None:
        """Publish the state: "serving", "draining" or "drained"; does nothing once closed."""
        with self._lock:
            self._state = state
            self._write()

    def beat(self) -> None:
        """Publish a sign of life; does nothing once closed."""
        with self._lock:
            self._beats += 1
            self._write()

    def _write(self) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, f"{self._started!r} {self._beats} {self._state}".ljust(_BYTES).encode(), 0)

    def predecessors(self) -> list[int]:
        """Process ids of this server's stubs that have an older entry of this name and serve: a reload leaves them."""
        own, server = os.getpid(), os.getppid()
        return [
            pid
            for pid in children_of(server)
            if pid != own
            for entry in states_of(pid)
            if entry.name == self.name and entry.started < self._started and entry.state == "serving"
        ]

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1


def states_of(pid: int) -> Iterator[InstanceState]:
    """The entries of a process."""
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(entry)
                if target.startswith(f"/memfd:{_PREFIX}"):
                    name = target.removeprefix("/memfd:").split(" ")[0]
                    started, beats, state = entry.read_text().split()
                    yield InstanceState(name, float(started), int(beats), state)


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found
