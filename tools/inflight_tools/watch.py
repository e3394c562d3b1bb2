"""Notices that a server which was ready has died, or hangs.

Triton restarts no stub, and reports "ready" after the death of one while its streams hang: on 24.10 a
server that is then asked to stop waits for them until its exit timeout.  So a watch follows

- the server process and every stub, by a descriptor that the kernel makes readable when the process ends;
- the answers of `/v2/health/live`;
- how long models take to load.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inflight_tools.processes import STUB_NAME, children, end_of
from inflight_tools.server_log import LoadingModels

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

__all__ = ["Death", "LiveChecks", "Watch"]

_SCAN_SECONDS = 0.5  # between two looks for new stubs
# An unloaded stub is dead until the server reaps it, and so is one that the server kills because its model failed
# to load.  A stub that stays dead was lost.
_CONFIRM_SECONDS = 0.2
_CONFIRM_EXIT_SECONDS = 2.0  # after exit status 0


@dataclass(frozen=True)
class Death:
    """What a watch noticed.

    Attributes:
        who: "server" or "stub" if that process ended, "hung" if the server no longer answers, "loading" if a
            model is neither loaded nor refused.
        returncode: of the process, as `subprocess` reports it; None where it still runs.
        model: of a stub, "" if it is not known.
        detail: for "hung" and "loading", what was seen.
    """

    who: str
    returncode: int | None = None
    model: str = ""
    detail: str = ""


class LiveChecks:
    """Asks again and again whether the server is live, in a thread of its own: a hung server keeps it waiting.

    Args:
        url: of the live endpoint.
        period: seconds between two checks.
        timeout: seconds that a check may take.
        missed: checks without an answer, in a row, that make a hung server.
    """

    def __init__(self, url: str, period: float = 2.0, timeout: float = 5.0, missed: int = 5) -> None:
        self._url = url
        self._period = period
        self._timeout = timeout
        self._allowed = missed
        self._missed = 0
        self._answered = time.monotonic()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-checks", daemon=True)

    def __enter__(self) -> LiveChecks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # a check that waits for a hung server is not waited for

    def failure(self) -> str | None:
        """What is wrong if too many checks in a row had no answer, else None."""
        if self._missed < self._allowed:
            return None
        return f"{self._missed} live checks in a row had no answer for {time.monotonic() - self._answered:.0f} s"

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            if self._answers():
                self._missed, self._answered = 0, time.monotonic()
            else:
                self._missed += 1

    def _answers(self) -> bool:
        try:
            with self._opener.open(self._url, timeout=self._timeout):
                return True
        except (OSError, http.client.HTTPException):
            return False


class Watch:
    """Watches a server that has been started.

    Args:
        server: the server.
        load_timeout: seconds that a model may take to load.
        live: takes the place of checks of its live endpoint.
    """

    def __init__(self, server: TritonServer, load_timeout: float, live: LiveChecks | None = None) -> None:
        assert server.process is not None and server.log_file is not None
        self._process = server.process
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}  # of the server and the stubs, by process id
        self._models: dict[int, str] = {}  # of the stubs
        self._dead_since: dict[int, float] = {}
        self._live = live or LiveChecks(f"http://{server.http_address}/v2/health/live")
        self._loading = LoadingModels(server.log_file, server.log_start, load_timeout)
        self._scanned = float("-inf")

    def wait(self, check: Callable[[], None] = lambda: None) -> Death:
        """Block until the server has died or hangs, or until `check`, called before each look, raises."""
        with self._live:
            try:
                self._follow(self._process.pid)
                while True:
                    check()
                    death = self._look()
                    if death is not None:
                        return death
                    waiting = _CONFIRM_SECONDS / 4 if self._dead_since else _SCAN_SECONDS
                    self._poll.poll(waiting * 1000)
            finally:
                for pid in list(self._descriptors):
                    self._unfollow(pid)

    def _look(self) -> Death | None:
        if self._process.poll() is not None:
            return Death("server", self._process.returncode)
        now = time.monotonic()
        if now - self._scanned >= _SCAN_SECONDS:
            self._scanned = now
            for pid in children(self._process.pid, STUB_NAME):
                self._follow(pid)
            missed, slow = self._live.failure(), self._loading.failure(now)
            if missed is not None:
                return Death("hung", detail=missed)
            if slow is not None:
                return Death("loading", detail=slow)
        return self._lost_stub(now)

    def _lost_stub(self, now: float) -> Death | None:
        for pid in [pid for pid in self._descriptors if pid != self._process.pid]:
            ended = end_of(pid)
            if ended is None:
                if not os.path.exists(f"/proc/{pid}"):  # reaped: the server knows
                    self._unfollow(pid)
                continue
            with contextlib.suppress(KeyError, ValueError):  # its descriptor would wake every wait from now on
                self._poll.unregister(self._descriptors[pid])
            since = self._dead_since.setdefault(pid, now)
            if now - since >= (_CONFIRM_SECONDS if ended else _CONFIRM_EXIT_SECONDS):
                return Death("stub", os.waitstatus_to_exitcode(ended), self._models.get(pid, ""))
        return None

    def _follow(self, pid: int) -> None:
        if pid in self._descriptors:
            return
        if pid != self._process.pid:
            self._models[pid] = _model_of(pid)
        with contextlib.suppress(AttributeError, OSError):  # an old kernel or Python: noticed by the next scan
            descriptor = self._descriptors[pid] = os.pidfd_open(pid)
            self._poll.register(descriptor, select.POLLIN)
            return
        self._descriptors[pid] = -1

    def _unfollow(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        self._dead_since.pop(pid, None)
        self._models.pop(pid, None)
        if descriptor >= 0:
            with contextlib.suppress(KeyError):  # unregistered when it died
                self._poll.unregister(descriptor)
            os.close(descriptor)


def _model_of(stub: int) -> str:
    """The model of a stub, from its command line, which names `<model>/<version>/model.py`."""
    with contextlib.suppress(OSError):
        for argument in Path(f"/proc/{stub}/cmdline").read_text(errors="replace").split("\0"):
            path = Path(argument)
            if path.name == "model.py" and len(path.parts) > 3:
                return path.parts[-3]
    return ""
