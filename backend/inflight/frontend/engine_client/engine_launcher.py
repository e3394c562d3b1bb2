"""Starts one engine process after another.  No torch, no Triton."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence

from inflight.config import EngineConfig
from inflight.engine.messages import encode
from inflight.frontend.engine_client.engine_handle import EngineHandle
from inflight.frontend.engine_client.engine_process import EngineProcess, EngineStartError, not_ready
from inflight.frontend.engine_client.fork_server_process import ForkFailed, ForkServerProcess
from inflight.frontend.engine_client.os_process import OsProcess, start_tied
from inflight.grammars.demand import new_demand

__all__ = ["EngineLauncher"]


class EngineLauncher:
    """Starts one engine process after another: forks of a fork server, unless `spare_engine` is off.

    Threads that call `launch` and `keep_fork_server` must outlive the processes (PR_SET_PDEATHSIG).

    Args:
        command: as `engine_command` returns it.
        env: environment variables added to this process's.
        launch: starts a process instead; there is no fork server then.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        env: Mapping[str, str],
        launch: Callable[[], EngineHandle] | None = None,
    ) -> None:
        self._config = config
        self._command = command
        self._env = env
        self._launch = launch
        self._lock = threading.Lock()  # guards all below
        self._fork_server: ForkServerProcess | None = None
        self._successor: ForkServerProcess | None = None  # of one that is outdated
        self._retired: list[ForkServerProcess] = []
        self._demand: int | None = None  # shared by all processes: see `new_demand`
        self._closed = False

    def launch(self) -> EngineHandle:
        """A new process, which loads the checkpoint.  Raises EngineStartError."""
        if self._launch is not None:
            return self._launch()
        if shutil.which(self._command[0]) is None:
            raise EngineStartError(
                f"cannot start the engine process: {self._command[0]!r} not found; fix python_executable in model.json"
            )
        return EngineProcess(self._config, self._fork if self._config.spare_engine else self._execute)

    def keep_fork_server(self) -> str | None:
        """Replace a fork server that has died, and say how it ended; else None.  Replace an outdated one, too.

        The next one does its imports on idle cores.  One that died during its imports is not replaced: `launch` will
        try again.
        """
        with self._lock, contextlib.suppress(OSError):  # `launch` will raise it, if a process is needed
            current = self._fork_server
            if current is None or self._closed or not current.is_ready:
                return None
            if current.has_ended:
                self._start_fork_server(idle=True)
                return current.exit_text()
            self._renew(current)
        return None

    def _renew(self, current: ForkServerProcess) -> None:
        """Have a successor made of an outdated one, once; it takes over when it is ready."""
        self._retired = [retired for retired in self._retired if not retired.has_ended]
        if self._successor is not None and self._successor.is_ready and not self._successor.has_ended:
            current.retire()
            self._retired.append(current)
            self._fork_server, self._successor = self._successor, None
        elif self._successor is None and current.is_outdated:
            self._successor = self._new_fork_server(idle=True)

    def close(self) -> None:
        """End the fork server; there will be no other.  A `launch` that waits for it fails."""
        with self._lock:
            self._closed = True
            for fork_server in (self._fork_server, self._successor, *self._retired):
                if fork_server is not None:
                    fork_server.stop()
            if self._demand is not None:
                os.close(self._demand)
                self._demand = None

    def _execute(self, pipe: int, heartbeat: int) -> OsProcess:
        options = ["--fd", str(pipe), "--heartbeat-fd", str(heartbeat)]
        try:
            return start_tied([*self._command, *options], [pipe, heartbeat], self._env)
        except OSError as error:
            raise _cannot_start(error) from None

    def _fork(self, pipe: int, heartbeat: int) -> OsProcess:
        while True:
            fork_server = self._usable_fork_server()
            was_ready, timeout = fork_server.is_ready, self._config.engine_start_timeout
            try:
                return fork_server.fork(pipe, heartbeat, timeout)
            except TimeoutError:
                raise not_ready(timeout) from None
            except ForkFailed as error:
                if not fork_server.has_ended:  # it cannot: a sandbox may allow processes, but no pidfd
                    return self._execute(pipe, heartbeat)
                if not was_ready:
                    raise _cannot_start(error) from None

    def _usable_fork_server(self) -> ForkServerProcess:
        """The one that there is, or a new one; one that imports on idle cores would take too long now."""
        with self._lock:
            if self._closed:
                raise EngineStartError("the model is being unloaded")
            old = self._fork_server
            if old is not None and not old.has_ended and (old.is_ready or not old.idle):
                return old
            try:
                return self._start_fork_server(idle=False)
            except OSError as error:
                raise _cannot_start(error) from None

    def _start_fork_server(self, idle: bool) -> ForkServerProcess:
        if self._fork_server is not None:
            self._fork_server.stop()
        self._fork_server = self._new_fork_server(idle)
        return self._fork_server

    def _new_fork_server(self, idle: bool) -> ForkServerProcess:
        if self._demand is None:
            self._demand = new_demand()
        return ForkServerProcess(encode(self._config), self._command, self._env, idle, self._demand)


def _cannot_start(error: Exception) -> EngineStartError:
    return EngineStartError(f"cannot start the engine process: {error}")
