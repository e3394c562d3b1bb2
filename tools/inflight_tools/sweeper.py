"""Ends a server, and removes what it left, after its launcher was killed.  A program of its own; standard library only.

    launcher ─┬─ tritonserver    gets SIGTERM from the kernel when the launcher ends (PR_SET_PDEATHSIG)
              └─ sweeper         reads the launcher's pipe, which ends with it: waits for the server, then sweeps

The sweeper has a session of its own, so neither Ctrl-C nor the end of the server's session reaches it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SHARED_MEMORY", "Sweeper", "remove_shared_memory", "session_members"]

SHARED_MEMORY = Path("/dev/shm")
_POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0  # after SIGKILL, until a process is gone
_DISMISSED = "dismissed"


def session_members(session: int) -> list[int]:
    """Process ids of a session's living members; zombies do not count."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):  # no process, or it ended meanwhile
            state = Path(f"/proc/{int(name)}/stat").read_text().rpartition(")")[2].split()[0]
            if os.getsid(int(name)) == session and state not in "ZX":
                found.append(int(name))
    return found


def kill_session(session: int) -> None:
    """Kill the members of a session, and wait until they are gone: then nothing holds its ports any more."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (members := session_members(session)) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 10)


def remove_shared_memory(prefix: str) -> None:
    """Remove the files in /dev/shm whose names start with `prefix`."""
    for leftover in SHARED_MEMORY.glob(prefix + "*"):
        leftover.unlink(missing_ok=True)


class Sweeper:
    """The launcher's end: a process that acts if this one ends before `dismiss`.

    Args:
        folders: to remove.
        shm_prefix: of the server's files in /dev/shm.
        seconds: that the server has to end by itself.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, folders: Sequence[str | Path], shm_prefix: str, seconds: float) -> None:
        command = [sys.executable, "-I", "-S", __file__, "--shm-prefix", shm_prefix, "--seconds", str(seconds)]
        self._process = subprocess.Popen(
            [*command, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def watch(self, server: int) -> None:
        """The server has been started, as the leader of its session."""
        self._say(str(server))

    def dismiss(self) -> None:
        """End the process: there is nothing to sweep.  Safe to repeat."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._say(_DISMISSED)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Sweeps up after a server whose launcher was killed.")
    parser.add_argument("--shm-prefix", required=True, help="of the server's files in /dev/shm")
    parser.add_argument("--seconds", type=float, required=True, help="that the server has to end by itself")
    parser.add_argument("folders", nargs="*", help="to remove")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a service manager signals the launcher, too
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    session: int | None = None
    for line in sys.stdin:
        if line.strip() == _DISMISSED:
            return
        session = int(line)
    if session is not None:
        deadline = time.monotonic() + args.seconds
        for pid in session_members(session):  # a model notices sooner than by itself that it is to drain
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while session_members(session) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        kill_session(session)
    remove_shared_memory(args.shm_prefix)
    for folder in args.folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
