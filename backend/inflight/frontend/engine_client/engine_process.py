"""The parent's handle of the engine process: exchange messages, learn how it ended, stop it.

The process runs `inflight.worker`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
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
from inflight.frontend.engine_client.os_process import OsProcess, exit_words, interpreter

__all__ = ["EngineProcess", "EngineStartError", "engine_command", "module_command", "not_ready"]

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[2]
_EXIT_SECONDS = 5.0

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


def not_ready(seconds: float) -> EngineStartError:
    return EngineStartError(
        f"the engine process was not ready after {seconds:g} s: raise engine_start_timeout in model.json"
    )


def module_command(module: str, python: str | None = None, isolated: bool = False) -> list[str]:
    """Command line that runs a module of this package, whatever the name of its folder.

    Args:
        isolated: with nothing but the standard library and this package.
    """
    return [python or interpreter(), *["-I", "-S"] * isolated, "-c", _RUN_WORKER, module, str(_PACKAGE)]


def engine_command(config: EngineConfig) -> list[str]:
    """Command line of the engine process, without its `--fd N`."""
    return module_command("inflight.worker", config.python_executable)


class EngineProcess:
    """One engine process, from start to exit.

    Args:
        start: starts it with its end of the socket pair and the shared memory in which it records what it does.

    Attributes:
        failure: what the engine process reported before it exited, or why it was killed.
        heartbeat: shows that it is alive, and what it runs.

    Raises:
        EngineStartError: raised by `start`.
    """

    def __init__(self, config: EngineConfig, start: Callable[[int, int], OsProcess]) -> None:
        ours, theirs = socket.socketpair()
        page = Heartbeat.create(config.max_num_seqs)
        try:
            with theirs:
                self._process = start(theirs.fileno(), page)
        except EngineStartError:
            ours.close()
            raise
        finally:
            self.heartbeat = Heartbeat(page, config.max_num_seqs)
            os.close(page)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._sending = threading.Lock()  # a closed descriptor's number can be reused
        self._ending = threading.Lock()  # guards the next
        self._left = False  # SIGKILL has not ended it in time
        self.failure: EngineFailed | None = None
        with contextlib.suppress(OSError):  # it died at once: `wait_ready` reports how
            self.send(encode(config))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout: float) -> EngineReady:
        """Block until the checkpoint is loaded.

        Raises:
            EngineStartError: loading failed, the process died, or `timeout` seconds passed.
        """
        message: ToFrontend | None = None
        with contextlib.suppress(EOFError, OSError):
            if not self._connection.poll(timeout):
                raise not_ready(timeout)
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
            self._process.kill()
            self.failure = EngineFailed(f"it sent an invalid frame: {error}")
            raise EOFError from None
        if isinstance(message, EngineFailed):
            self.failure = message
        return message

    def kill(self, reason: str) -> None:
        """End it at once, even if it is stopped or hangs; `exit_text` then returns the reason."""
        self.failure = self.failure or EngineFailed(reason)
        self._process.kill()
        self._hang_up()

    def exit_text(self) -> str:
        """How it ended, in a few words.  A process that has closed its pipe but still runs is killed."""
        try:
            status = self._process.wait(0.0 if self._left else _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
            return "it closed its pipe and hung" if self.failure is None else self.failure.message
        if self.failure is not None:
            return self.failure.message
        return exit_words(status)

    def watch_turns(self, told: Callable[[bool], None]) -> None:
        """It has one frontend, which always has the turn."""
        told(True)

    def end_turn(self) -> None:
        """No effect: see `watch_turns`."""

    def stop(self, polite: bool = True) -> None:
        """End it: close our side of the pipe, then SIGKILL.  Returns within ten seconds.  Safe to repeat.

        Half-closing the socket tells the engine to exit.  Unlike a `Shutdown` message, it does not block on an
        engine that reads nothing, and it wakes the writer thread up.

        Args:
            polite: give it time to exit by itself; no use while it is loading, when it reads nothing.
        """
        if polite and not self._left and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
        if self._process.poll() is None:
            self._end()

    def _end(self) -> None:
        """SIGKILL: it ignores SIGTERM, which service managers send to every process of the server.

        A process that waits for a disk that hangs ends only when the disk answers.  It is waited for once, and then
        left.
        """
        with self._ending:
            if self._left:
                return
            self._process.kill()
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._left = True
                text = "the engine process %d was killed, and has not ended %g s later: a disk or device that it waits"
                _log.warning(text + " for hangs.  It keeps its memory until then", self.pid, _EXIT_SECONDS)
                self._hang_up()

    def _hang_up(self) -> None:
        """`receive` yields what has come, and then raises EOFError, even if the process lives on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the pipe of a process that has ended, or is left."""
        with self._sending:
            self._connection.close()
        self._socket.close()
        self._process.close()
