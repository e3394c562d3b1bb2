"""The operating system's side of an engine process: how it is started, watched and killed.  No torch, no Triton."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

__all__ = [
    "TIED_TO_PARENT",
    "UNKNOWN_STATUS",
    "ChildProcess",
    "ForkedProcess",
    "OsProcess",
    "exit_words",
    "interpreter",
    "start_tied",
]

# Runs in the child, then becomes the engine process: prctl(PR_SET_PDEATHSIG, SIGKILL) survives
# execve, so even a process that is loading, and reads no pipe, dies with its parent.  A preexec_fn
# would run Python between fork and exec of a threaded parent.
TIED_TO_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)

UNKNOWN_STATUS = 256  # of a process that ended after its fork server did, or has not ended
_REPORT_SECONDS = 2.0  # from the end of a process to the report of its status, by a fork server that runs


def exit_words(status: int) -> str:
    """How a process ended, in a few words; `status` as `subprocess` has it, or `UNKNOWN_STATUS`."""
    if status == UNKNOWN_STATUS:
        return "its exit status is unknown"
    return f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def interpreter() -> str:
    """The Python that runs this process, even where Python is embedded (Triton's stub)."""
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    return shutil.which(f"python{sys.version_info[0]}.{sys.version_info[1]}") or shutil.which("python3") or "python3"


class ChildProcess(subprocess.Popen[bytes]):
    """A child of this process."""

    def close(self) -> None:
        """See `OsProcess.close`; no descriptor is held."""


def start_tied(command: Sequence[str], descriptors: Sequence[int], env: Mapping[str, str]) -> ChildProcess:
    """Start a program that is killed when the calling thread ends (PR_SET_PDEATHSIG).

    Args:
        descriptors: that it inherits besides its standard output and error.
        env: environment variables added to this process's.

    Raises:
        OSError: it cannot be run.
    """
    return ChildProcess(
        [interpreter(), "-I", "-S", "-c", TIED_TO_PARENT, str(os.getpid()), *command],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


class OsProcess(Protocol):
    """A process, with the methods of `subprocess.Popen`, and `close`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...

    def close(self) -> None:
        """Close what is open of it: it has ended, or was killed and is left."""


class ForkedProcess:
    """A process that a fork server has forked: not a child of this one.

    Args:
        pid: its process id.
        pidfd: of it; taken over.
        owner: the other end of its pipe: the process is killed when it closes; taken over.
        report: receives its exit status (see `ForkRequest`); taken over.
    """

    def __init__(self, pid: int, pidfd: int, owner: int, report: socket.socket) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._owner = owner
        self._report = report
        self._lock = threading.Lock()  # guards all below, and the descriptors
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        with self._lock:
            if self._status is None and _readable(self._pidfd, 0.0):
                self._close(self._read_status())
            return self._status

    def close(self) -> None:
        """See `OsProcess.close`; its status is not known then."""
        with self._lock:
            if self._status is None:
                self._close(UNKNOWN_STATUS)

    def _close(self, status: int) -> None:
        self._status = status
        os.close(self._pidfd)
        os.close(self._owner)
        self._report.close()

    def watch(self) -> int:
        """A new descriptor that is readable once it has ended."""
        with self._lock:
            return os.dup(self._pidfd)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status.  Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._wait_for_end(left)
        return status

    def _wait_for_end(self, seconds: float | None) -> None:
        with self._lock:
            if self._status is not None:
                return
            pidfd = os.dup(self._pidfd)  # another thread can close it meanwhile
        try:
            _readable(pidfd, seconds)
        finally:
            os.close(pidfd)

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _read_status(self) -> int:
        self._report.settimeout(_REPORT_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            return int(self._report.recv(16))
        return UNKNOWN_STATUS


def _readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1e3 * seconds))
