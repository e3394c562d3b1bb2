"""Notices that a server which was ready has died, or one of its stubs.

Triton 24.10 restarts no stub, and reports "ready" after the death of one while its streams hang.  Everything else
that can go wrong with a server (it hangs, it must be started again) is the business of a service manager.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from inflight_tools.processes import STUB_NAME, children, end_of, how_it_ended

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

__all__ = ["wait_for_death"]

_LOOK_SECONDS = 0.1
_SCAN_SECONDS = 0.5  # between two searches for new stubs
# An unloaded stub is a zombie until the server reaps it, and so is a stub that the server kills because its model
# failed to load.  A stub that the server does not reap was lost.
_CONFIRM_SECONDS = 0.2
_CONFIRM_EXIT_SECONDS = 2.0  # after exit status 0


def wait_for_death(server: TritonServer, check: Callable[[], None] = lambda: None) -> str:
    """Block until a running server or one of its stubs has died.

    Args:
        server: a server that has been started.
        check: called ten times a second; an exception that it raises ends the wait.

    Returns:
        One line: which process died, and by which signal or exit status.
    """
    assert server.process is not None
    stubs: dict[int, str] = {}  # the model of each stub, by process id
    dead_since: dict[int, float] = {}
    scanned = float("-inf")
    while True:
        check()
        returncode = server.process.poll()
        if returncode is not None:
            return f"tritonserver died ({how_it_ended(returncode)})"
        now = time.monotonic()
        if now - scanned >= _SCAN_SECONDS:
            scanned = now
            stubs = {pid: stubs.get(pid) or _model_of(pid) for pid in children(server.process.pid, STUB_NAME)}
        for pid, model in stubs.items():
            ended = end_of(pid)
            if ended is None:
                dead_since.pop(pid, None)
            elif now - dead_since.setdefault(pid, now) >= (_CONFIRM_SECONDS if ended else _CONFIRM_EXIT_SECONDS):
                whose = f"model '{model}'" if model else "a model"
                how = how_it_ended(os.waitstatus_to_exitcode(ended))
                return f"the stub process of {whose} died ({how}), and its streams would hang"
        time.sleep(_LOOK_SECONDS)


def _model_of(stub: int) -> str:
    """The model of a living stub, from its command line, which names `<model>/<version>/model.py`; else ""."""
    with contextlib.suppress(OSError):
        for argument in Path(f"/proc/{stub}/cmdline").read_text(errors="replace").split("\0"):
            path = Path(argument)
            if path.name == "model.py" and len(path.parts) > 3:
                return path.parts[-3]
    return ""
