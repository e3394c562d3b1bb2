"""The parent's handle of the engine process: start it, exchange messages, learn how it ended, stop it.

The process runs `inflight.worker`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from inflight.config import EngineConfig
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import (
    EngineFailed,
    EngineReady,
    ToFrontend,
    decode_to_frontend,
    encode,
)
from inflight.frontend.engine_client.engine_handle import EngineHandle

__all__ = [
    "TIED_TO_PARENT",
    "EngineLauncher",
    "EngineProcess",
    "EngineStartError",
    "engine_command",
    "exit_words",
    "interpreter",
    "module_command",
]

_PACKAGE = Path(__file__).resolve().parents[2]
_EXIT_SECONDS = 5.0

# Runs in the child, then becomes the engine process: prctl(PR_SET_PDEATHSIG, SIGKILL) survives
# execve, so even a process that is loading, and reads no pipe, dies with its parent.  A preexec_fn
# would run Python between fork and exec of a threaded parent.
TIED_TO_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)

# `python -m inflight.worker` and the like, for a package in a folder of any name (as in `model.py`).  The
# module's name is an argument, so that lists of processes show it.
_RUN_WORKER = (
    "import importlib.util as u,runpy,sys\n"
    "module,folder=sys.argv.pop(1),sys.argv.pop(1)\n"
    "spec=u.spec_from_file_location('inflight',folder+'/__init__.py',submodule_search_locations=[folder])\n"
    "sys.modules['inflight']=package=u.module_from_spec(spec)\n"
    "spec.loader.exec_module(package)\n"
    "runpy.run_module(module,run_name='__main__',alter_sys=True)"
)


class EngineStartError(RuntimeError):
    """The engine process could not be started, or failed to load the model.

    Attributes:
        fatal: a restart cannot help.
        lost: the process had been up for another frontend, and died before this one could use it.
    """

    def __init__(self, message: str, fatal: bool = False, lost: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal
        self.lost = lost


def exit_words(status: int) -> str:
    """How a process ended, in a few words; `status` as `subprocess` has it."""
    return f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def interpreter() -> str:
    """The Python that runs this process, even where Python is embedded (Triton's stub)."""
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    return shutil.which(f"python{sys.version_info[0]}.{sys.version_info[1]}") or shutil.which("python3") or "python3"


def module_command(module: str, python: str | None = None) -> list[str]:
    """Command line that runs a module of this package, whatever the name of its folder."""
    return [python or interpreter(), "-c", _RUN_WORKER, module, str(_PACKAGE)]


def engine_command(config: EngineConfig) -> list[str]:
    """Command line of the engine process, without its `--fd N`."""
    return module_command("inflight.worker", config.python_executable)


class EngineProcess:
    """One engine process, from start to exit.  Create it in a thread that outlives it (PR_SET_PDEATHSIG).

    Args:
        command: as `engine_command` returns it.
        env: environment variables added to this process's.
        spare: import what loading needs, then wait for `wake`.

    Attributes:
        failure: what the engine process reported before it exited, or why it was killed.
        heartbeat: shows that it is alive, and what it runs.

    Raises:
        EngineStartError: the program cannot be run.
    """

    def __init__(
        self, config: EngineConfig, command: Sequence[str], env: Mapping[str, str], spare: bool = False
    ) -> None:
        if shutil.which(command[0]) is None:
            raise EngineStartError(
                f"cannot start the engine process: {command[0]!r} not found; fix python_executable in model.json"
            )
        ours, theirs = socket.socketpair()
        page = Heartbeat.create(config.max_num_seqs)
        wrapper = [interpreter(), "-I", "-S", "-c", TIED_TO_PARENT, str(os.getpid())]
        try:
            self._popen = subprocess.Popen(
                [*wrapper, *command, "--fd", str(theirs.fileno()), "--heartbeat-fd", str(page), *["--spare"] * spare],
                pass_fds=[theirs.fileno(), page],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
            )
        except OSError as error:
            ours.close()
            raise EngineStartError(f"cannot start the engine process: {error}") from None
        finally:
            theirs.close()
            self.heartbeat = Heartbeat(page, config.max_num_seqs)
            os.close(page)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._sending = threading.Lock()  # a closed descriptor's number can be reused
        self.failure: EngineFailed | None = None
        with contextlib.suppress(OSError):  # it died at once: `wait_ready` reports how
            self.send(encode(config))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def wake(self) -> None:
        """Let a spare process load the checkpoint.  Raises OSError if it is gone."""
        self.send(b"load")

    def wait_ready(self, timeout: float) -> EngineReady:
        """Block until the checkpoint is loaded.

        Raises:
            EngineStartError: loading failed, the process died, or `timeout` seconds passed.
        """
        message: ToFrontend | None = None
        with contextlib.suppress(EOFError, OSError):
            if not self._connection.poll(timeout):
                raise EngineStartError(
                    f"the engine process was not ready after {timeout:g} s: raise engine_start_timeout in model.json"
                )
            message = self.receive()
        if isinstance(message, EngineReady):
            return message
        if isinstance(message, EngineFailed):
            raise EngineStartError(message.message, message.fatal)
        raise EngineStartError(f"the engine process exited while loading the model ({self.exit_text()})")

    def send(self, frame: bytes) -> None:
        """Raises OSError if the process is gone."""
        with self._sending:
            self._connection.send_bytes(frame)

    def receive(self) -> ToFrontend:
        """The next message.  Raises EOFError or OSError if the process is gone or sent an invalid frame."""
        try:
            message = decode_to_frontend(self._connection.recv_bytes())
        except msgspec.DecodeError as error:
            self._popen.kill()
            self.failure = EngineFailed(f"it sent an invalid frame: {error}")
            raise EOFError from None
        if isinstance(message, EngineFailed):
            self.failure = message
        return message

    def kill(self, reason: str) -> None:
        """End it at once, even if it is stopped or hangs; `exit_text` then returns the reason."""
        self.failure = self.failure or EngineFailed(reason)
        self._popen.kill()

    def exit_text(self) -> str:
        """How it ended, in a few words.  A process that has closed its pipe but still runs is killed."""
        try:
            status = self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            return "it closed its pipe and hung"
        if self.failure is not None:
            return self.failure.message
        return exit_words(status)

    def watch_turns(self, told: Callable[[bool], None]) -> None:
        """It has one frontend, which always has the turn."""
        told(True)

    def end_turn(self) -> None:
        """No effect: see `watch_turns`."""

    def stop(self, polite: bool = True) -> None:
        """End it: close our side of the pipe, then SIGKILL.  Safe to repeat.

        Half-closing the socket tells the engine to exit.  Unlike a `Shutdown` message, it does not block on an
        engine that reads nothing, and it wakes the writer thread up.

        Args:
            polite: give it time to exit by itself; no use while it is loading, when it reads nothing.
        """
        if polite and self._popen.poll() is None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_EXIT_SECONDS)
        if self._popen.poll() is None:
            self._popen.kill()  # it ignores SIGTERM, which service managers send to every process of the server
        self._popen.wait()

    def close(self) -> None:
        """Close the pipe of a process that has ended."""
        with self._sending:
            self._connection.close()
        self._socket.close()


class EngineLauncher:
    """Starts one engine process after another, and keeps spare ones that only have to load the checkpoint.

    Threads that call `launch` and `keep` must outlive the processes (PR_SET_PDEATHSIG).

    Args:
        command, env: see `EngineProcess`.
        launch: starts a process instead; there are no spare ones then.
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
        self._lock = threading.Lock()  # guards the two below
        self._spares: list[EngineProcess] = []  # oldest first
        self._closed = False

    def launch(self) -> EngineHandle:
        """The oldest spare process, else a new one.  Raises EngineStartError."""
        if self._launch is not None:
            return self._launch()
        while spares := self._take_spares(1):
            with contextlib.suppress(OSError):
                if not spares[0].has_ended:
                    spares[0].wake()
                    return spares[0]
            _discard(spares[0])
        return EngineProcess(self._config, self._command, self._env)

    def keep(self, count: int) -> None:
        """Have `count` spare processes: start or end some.  No effect if the options say that there are none."""
        if not self._config.spare_engine or self._launch is not None:
            return
        with self._lock:
            missing = 0 if self._closed else count - len(self._spares)
            with contextlib.suppress(EngineStartError):  # `launch` will raise it, if a process is needed
                for _ in range(missing):
                    self._spares.append(EngineProcess(self._config, self._command, self._env, spare=True))
        for spare in self._take_spares(-missing):
            _discard(spare)

    def close(self) -> None:
        """End the spare processes; there will be no other."""
        with self._lock:
            self._closed = True
            count = len(self._spares)
        for spare in self._take_spares(count):
            _discard(spare)

    def _take_spares(self, count: int) -> list[EngineProcess]:
        """At most `count` of them, the oldest."""
        count = max(0, count)
        with self._lock:
            taken, self._spares = self._spares[:count], self._spares[count:]
        return taken


def _discard(process: EngineProcess) -> None:
    process.stop(polite=False)
    process.close()
