"""Which processes a server has left."""

from __future__ import annotations

import contextlib
import os

import psutil

__all__ = ["dead_children", "session_members"]

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def session_members(session: int) -> list[int]:
    """Process ids of a session's living members; zombies do not count."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            if os.getsid(pid) == session and psutil.Process(pid).status() not in _ENDED:
                found.append(pid)
    return found


def dead_children(parent: int, name: str) -> list[int]:
    """Process ids of the zombies that `parent` has not reaped and whose name starts with `name`."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # the parent
        for child in psutil.Process(parent).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_ZOMBIE and child.name().startswith(name):
                    found.append(child.pid)
    return found
