"""The processes of a running server."""

from __future__ import annotations

import contextlib

import psutil

from inflight_tools.launcher import TritonServer


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []


def engine_processes(server: TritonServer, spare: bool = False) -> list[psutil.Process]:
    """Those that have loaded a checkpoint, or are about to; or the spare ones.

    By the name that a worker gives itself: one that still imports is neither.
    """
    assert server.process is not None
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == ("inflight-spare" if spare else "inflight-engine"):
                found.append(process)
    return found
