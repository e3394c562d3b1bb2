"""The parent's handle of a fork server, which starts engine processes in milliseconds (`inflight/fork_server.py`).

Only the standard library: the daemon of a shared engine uses it, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from inflight.frontend.engine_client.os_process import ForkedProcess, exit_words, start_tied

__all__ = ["ForkFailed", "ForkServerProcess"]

_OUTDATED = b"o"  # of inflight/fork_server.py
_FORK_SECONDS = 10.0  # for a fork, once the imports are done
_EXIT_SECONDS = 5.0


class ForkFailed(Exception):
    """There is no new process; says why."""


class ForkServerProcess:
    """One fork server, from start to exit.  Create it in a thread that outlives it (PR_SET_PDEATHSIG).

    It forks in one thread at a time.

    Args:
        config: the engine's first frame.
        command: of the engine process, as `engine_command` returns it.
        env: environment variables added to this process's.
        idle: do the imports on idle cores only.
        demand: memory that all processes of the model share (`grammars/demand.py`); None: its forks alone share one.

    Attributes:
        idle: as given.
        is_outdated: whether another one, made now, could do more for its forks; as of the last `is_ready`.

    Raises:
        OSError: the program cannot be run.
    """

    def __init__(
        self,
        config: bytes,
        command: Sequence[str],
        env: Mapping[str, str],
        idle: bool,
        demand: int | None = None,
    ) -> None:
        self.idle = idle
        self._is_ready = self.is_outdated = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            options = ["--fork-server", "--fd", str(theirs.fileno()), *["--idle"] * idle]
            shared = [] if demand is None else [demand]
            options += [f"--demand-fd={descriptor}" for descriptor in shared]
            try:
                self._popen = start_tied([*command, *options], [theirs.fileno(), *shared], env)
            except OSError:
                self._socket.close()
                raise
        with contextlib.suppress(OSError), Connection(os.dup(self._socket.fileno())) as connection:
            connection.send_bytes(config)  # if it died at once, `fork` reports how

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def exit_text(self) -> str:
        """How it ended, in a few words."""
        return exit_words(self._popen.wait())

    @property
    def is_ready(self) -> bool:
        """Whether it has done the imports."""
        with contextlib.suppress(OSError):
            if said := self._socket.recv(16, socket.MSG_DONTWAIT):
                self._is_ready = True
                self.is_outdated = self.is_outdated or _OUTDATED in said
        return self._is_ready

    def fork(self, pipe: int, heartbeat: int, timeout: float) -> ForkedProcess:
        """An engine process with copies of these descriptors, which is killed with this process.

        Args:
            timeout: seconds that the imports can take, if they are still under way.

        Raises:
            TimeoutError: they take longer; the fork server is ended.
            ForkFailed: the fork server ended or hung, and is useless; or the system has no room for the process.
        """
        seconds = _FORK_SECONDS if self.is_ready else timeout
        owned, owner = os.pipe()
        report, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [b"f"], [pipe, heartbeat, owned, theirs.fileno()])
            report.settimeout(seconds)
            answer, descriptors, _, _ = socket.recv_fds(report, 1024, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            os.close(owner)
            report.close()
            if not isinstance(error, TimeoutError):
                raise ForkFailed(self._end_text()) from None
            self.stop()
            if self._is_ready:
                raise ForkFailed(f"its fork server did not fork within {seconds:g} s") from None
            raise
        finally:
            os.close(owned)
        if not descriptors:
            os.close(owner)
            report.close()
            raise ForkFailed(answer.decode() or self._end_text())
        self._is_ready = True
        return ForkedProcess(int(answer), descriptors[0], owner, report)

    def _end_text(self) -> str:
        """How it ended; kills it if it has closed its socket and still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_EXIT_SECONDS)
        self.stop()
        return f"its fork server ended ({self.exit_text()})"

    def retire(self) -> None:
        """Fork no more; it ends when its forks have, and reports how."""
        self._socket.close()

    def stop(self) -> None:
        """End it; its forks live on.  Safe to repeat."""
        self._popen.kill()
        self._popen.wait()
        self._socket.close()
