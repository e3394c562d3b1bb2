"""The stubs of a model that share one engine process, as one of them sees it.  No torch, no Triton.

They meet at an abstract Unix socket.  Its name identifies what they share: the server process, the model and its
version, and the engine's configuration.  A stub that finds no listener starts the daemon
(`frontend/engine_client/shared_engine_daemon.py`), which owns the engine process.  Abstract sockets leave no file
behind; both sides check the user id of the other.

When a model is loaded again, the stubs of the previous load are still finishing their requests.  The daemon accepts
each instance name once, and no stub after one has left; a refused stub tries the next socket name.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from inflight.config import EngineConfig
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import EngineFailed, EngineReady, ToFrontend, decode_to_frontend, encode
from inflight.frontend.engine_client import shared_engine_daemon as daemon
from inflight.frontend.engine_client.device_placement import num_sharing
from inflight.frontend.engine_client.engine_process import EngineStartError, engine_command, module_command
from inflight.frontend.engine_client.os_process import TIED_TO_PARENT, exit_words, interpreter

__all__ = ["EngineGroup", "SharedEngine", "find_group", "group_name"]

_NAMES = 16  # loads of one model that can overlap
_JOIN_SECONDS = 30.0
_REPLY_SECONDS = 5.0
_END_SECONDS = 5.0
_LEAVE_SECONDS = 12.0
_RETRY_SECONDS = 0.01
_MAX_TRIES = 50


def group_name(config: EngineConfig, env: Mapping[str, str], *identity: str) -> str:
    """A name that the stubs with the same server, model and configuration have in common.

    Args:
        identity: the model's folder, name and version.
    """
    server = os.getppid()
    with contextlib.suppress(OSError):  # a process id can be reused
        stat = Path(f"/proc/{server}/stat").read_text()
        identity = (*identity, stat.rpartition(")")[2].split()[19])
    parts = [str(server), *identity, encode(config).hex(), json.dumps(sorted(env.items()))]
    return "inflight-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def find_group(
    config: EngineConfig,
    env: Mapping[str, str],
    args: Mapping[str, str],
    folder: Path,
) -> EngineGroup | None:
    """The group of a Triton model instance; None if it is alone on its device.

    Args:
        config, env: as `placement` returns them.
        args: Triton's, of `initialize`.
        folder: of the model's version.
    """
    model_config, device = json.loads(args["model_config"]), int(args["model_instance_device_id"])
    if num_sharing(model_config, args["model_instance_kind"], device) < 2:
        return None
    name = group_name(config, env, str(folder), args["model_name"], args["model_version"])
    return EngineGroup(config, engine_command(config), env, name, args["model_instance_name"])


class _Ended(NamedTuple):
    """How an engine process ended: its exit status, its last message, and why the daemon killed it, if so."""

    status: int
    failure: EngineFailed | None
    killed: str | None

    @property
    def text(self) -> str:
        if self.killed is not None:
            return self.killed
        return self.failure.message if self.failure is not None else exit_words(self.status)


class EngineGroup:
    """This stub's membership in a group; starts engine processes, or joins running ones.

    Args:
        command: of the engine process, as `engine_command` returns it.
        env: environment variables for it, added to this process's.
        name: as `group_name` returns it.
        instance: Triton's name of this model instance.
        turn_seconds: seconds that a stub has after a death to try its requests again while the others wait.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        env: Mapping[str, str],
        name: str,
        instance: str,
        turn_seconds: float = 30.0,
    ) -> None:
        self._turn_seconds = turn_seconds
        self._config, self._command, self._env = config, list(command), dict(env)
        self._name, self._instance = name, instance
        self._told: Callable[[str], None] = lambda text: None
        self._number: int | None = None
        self._process: subprocess.Popen[bytes] | None = None  # the daemon, if it is our child
        self._changed = threading.Condition()  # guards all below
        self._daemon: socket.socket | None = None
        self._asked = 0  # engine processes so far; answers to all but the last question are too late
        self._grant: tuple[int, int, socket.socket, Heartbeat] | str | None = None
        self._latest: tuple[int, socket.socket] | None = None  # the engine process that was granted last, and its pipe
        self._turn = True  # at the engine process that was granted last
        self._on_turn: Callable[[bool], None] = lambda ours: None
        self._ended: dict[int, _Ended] = {}

    @property
    def number(self) -> int:
        """Number of this stub in the group, from 0, once it has joined; it never changes."""
        return self._number or 0

    # -- any thread ------------------------------------------------------------------------

    def launch(self) -> SharedEngine:
        """A pipe to the engine process of the group.

        Raises:
            EngineStartError: there is none, and none can be started.
        """
        if shutil.which(self._command[0]) is None:
            raise EngineStartError(
                f"cannot start the engine process: {self._command[0]!r} not found; fix python_executable in model.json"
            )
        if self._daemon is None:
            self._join()
        with self._changed:
            self._asked += 1
            late, self._grant = self._grant, None
        if isinstance(late, tuple):
            late[2].close()
        self._send({"op": "engine", "asked": self._asked})
        with self._changed:
            self._changed.wait_for(lambda: self._grant is not None or self._daemon is None, _JOIN_SECONDS)
            grant, self._grant = self._grant, None
        if isinstance(grant, tuple):
            return SharedEngine(self, *grant)
        raise EngineStartError(grant or "the process that owns the engine process died or hangs")

    def hear(self, told: Callable[[str], None]) -> None:
        """Call `told` with the messages of other stubs from now on, in a thread that must not block."""
        self._told = told

    def tell(self, text: str) -> None:
        """Send a message to the other running stubs of the group."""
        self._send({"op": "tell", "text": text})

    def leave(self) -> None:
        """Stop using the engine process; if no other stub uses it, return when it has ended.  Safe to repeat."""
        self._send({"op": "leave"})
        with self._changed:
            if self._daemon is not None:
                with contextlib.suppress(OSError):  # if its socket is full, it sees the end of ours
                    self._daemon.shutdown(socket.SHUT_WR)
            self._changed.wait_for(lambda: self._daemon is None, _LEAVE_SECONDS)
        if self._process is not None:
            # It is our child: wait for it if this was the last stub.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)

    def kill(self, engine: int, reason: str) -> None:
        """Kill the engine process with that number, for all stubs; no effect if it has ended."""
        self._send({"op": "kill", "engine": engine, "reason": reason})
        with self._changed:
            if self._daemon is None:  # the engine was killed with it, and has not ended
                self._hang_up(engine)

    def end_turn(self, engine: int) -> None:
        """See `EngineHandle.end_turn`."""
        self._send({"op": "settled", "engine": engine})

    def watch_turns(self, told: Callable[[bool], None]) -> None:
        """See `EngineHandle.watch_turns`."""
        with self._changed:
            self._on_turn = told
            told(self._turn)

    def wait_ended(self, engine: int, seconds: float) -> _Ended | None:
        """How the engine process with that number ended; None if it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: engine in self._ended or self._daemon is None, seconds)
            if engine not in self._ended and self._daemon is None:
                return _Ended(0, EngineFailed("the process that owns the engine process died"), None)
            return self._ended.get(engine)

    def _send(self, packet: dict[str, Any]) -> None:
        with self._changed:
            if self._daemon is not None:
                with contextlib.suppress(OSError):  # it died: the reader notices; or it is stopped, and its socket full
                    self._daemon.send(json.dumps(packet).encode(), daemon.SEND)

    # -- joining ---------------------------------------------------------------------------

    def _join(self) -> None:
        """Become a member of the first group with our name that accepts us, or of a new one."""
        deadline = time.monotonic() + _JOIN_SECONDS
        tries = Counter[int]()
        while time.monotonic() < deadline:
            taken = {
                index for index in tries if tries[index] > _MAX_TRIES
            }  # the name is in use, but there is no listener
            for index in range(_NAMES):
                end = self._connect(index)
                if end is not None and self._is_member(end):
                    return
                if end is not None:
                    taken.add(index)
            free = next((index for index in range(_NAMES) if index not in taken), None)
            if free is not None and (end := self._start_daemon(free)) is not None:
                if self._is_member(end):
                    return
                raise EngineStartError("the process that owns the engine process could not be started")
            if free is not None:
                tries[free] += 1
            time.sleep(_RETRY_SECONDS)  # another stub is starting the daemon
        raise EngineStartError(f"{_NAMES} loads of this model are under way, and none takes this instance")

    def _address(self, index: int) -> str:
        return f"\0{self._name}-{index}"

    def _connect(self, index: int) -> socket.socket | None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.settimeout(_REPLY_SECONDS)
        try:
            end.connect(self._address(index))
        except OSError:
            end.close()
            return None
        return end

    def _is_member(self, end: socket.socket) -> bool:
        """Whether the daemon at the other end accepts us; `end` is closed if not."""
        packet = {"op": "join", "instance": self._instance, "number": self._number}
        try:
            if daemon.peer_uid(end) != os.geteuid():
                raise OSError("another user's")
            end.send(json.dumps(packet).encode(), socket.MSG_NOSIGNAL)
            reply = json.loads(end.recv(daemon.MAX_PACKET) or b"{}")
        except OSError:
            reply = {}
        if reply.get("op") != "joined":
            end.close()
            return False
        end.settimeout(None)
        self._number = reply["number"]
        with self._changed:
            self._daemon, self._ended = end, {}
        threading.Thread(target=self._listen, args=(end,), name="shared-engine", daemon=True).start()
        return True

    def _start_daemon(self, index: int) -> socket.socket | None:
        """Start a daemon; None if another stub is starting one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self._address(index))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise EngineStartError(f"cannot share an engine process: {error}") from None
                return None
            listener.listen(64)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_REPLY_SECONDS)
            orders = {
                "command": self._command,
                "wrapper": [interpreter(), "-I", "-S", "-c", TIED_TO_PARENT],
                "config": base64.b64encode(encode(self._config)).decode(),
                "heartbeat_bytes": Heartbeat.size(self._config.max_num_seqs),
                "turn_seconds": self._turn_seconds,
                "has_spare": self._config.spare_engine,
            }
            with theirs:
                options = ["--listen", str(listener.fileno()), "--member", str(theirs.fileno())]
                try:
                    self._process = subprocess.Popen(
                        [*module_command(daemon.__name__, isolated=True), *options],
                        pass_fds=[listener.fileno(), theirs.fileno()],
                        stdin=subprocess.PIPE,
                        env={**os.environ, **self._env},
                    )
                except OSError as error:
                    ours.close()
                    raise EngineStartError(f"cannot start the engine process: {error}") from None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as orders_pipe:
            orders_pipe.write(json.dumps(orders).encode())
        return ours

    # -- the thread that reads from the daemon ---------------------------------------------

    def _listen(self, end: socket.socket) -> None:
        with end:
            while True:
                try:
                    data, descriptors, _, _ = socket.recv_fds(end, daemon.MAX_PACKET, 2, socket.MSG_CMSG_CLOEXEC)
                except OSError:
                    data = b""
                if not data:
                    break
                packet = json.loads(data)
                if packet["op"] == "told":
                    self._told(packet["text"])
                    continue
                with self._changed:
                    self._take(packet, descriptors)
                    self._changed.notify_all()
            with self._changed:
                self._daemon = None
                self._changed.notify_all()

    def _take(self, packet: dict[str, Any], descriptors: Sequence[int]) -> None:
        if packet.get("asked", self._asked) != self._asked:  # its pipe would repeat what another one says
            for descriptor in descriptors:
                os.close(descriptor)
        elif packet["op"] == "engine":
            pipe, page = descriptors
            heartbeat = Heartbeat(page, self._config.max_num_seqs)
            os.close(page)
            self._latest = packet["engine"], socket.socket(fileno=pipe)
            self._grant = packet["engine"], packet["pid"], self._latest[1], heartbeat
            self._turn = packet["turn"]
        elif packet["op"] == "turn":
            self._turn = packet["turn"]
            self._on_turn(self._turn)
        elif packet["op"] == "error":
            self._grant = packet["text"]
        elif packet["op"] == "ended":
            words = base64.b64decode(packet["words"])
            last = decode_to_frontend(words) if words else None
            failure = last if isinstance(last, EngineFailed) else None
            self._ended = {packet["engine"]: _Ended(packet["status"], failure, packet["killed"])}
            self._hang_up(packet["engine"])

    def _hang_up(self, engine: int) -> None:
        """`SharedEngine.receive` yields what has come, and then raises EOFError, even if the engine lives on."""
        if self._latest is not None and self._latest[0] == engine:
            with contextlib.suppress(OSError):
                self._latest[1].shutdown(socket.SHUT_RDWR)


class SharedEngine:
    """An engine process that several stubs use, with the interface of `EngineProcess`.

    Args:
        number: of the engine process in its group.
        pid: its process id.
        pipe: to it, for this stub alone.
        heartbeat: shows that it is alive, and what it runs.
    """

    def __init__(self, group: EngineGroup, number: int, pid: int, pipe: socket.socket, heartbeat: Heartbeat) -> None:
        self._group, self._number, self.pid, self.heartbeat = group, number, pid, heartbeat
        self._socket = pipe
        self._connection = Connection(os.dup(pipe.fileno()))
        self._sending = threading.Lock()  # a closed descriptor's number can be reused
        self._stopped = False

    def wait_ready(self, timeout: float) -> EngineReady:
        """Block until the checkpoint is loaded.

        Raises:
            EngineStartError: loading failed, the process died, or `timeout` seconds passed.
        """
        message: ToFrontend | None = None
        with contextlib.suppress(EOFError, OSError):
            if not self._connection.poll(timeout):
                late = f"not ready after {timeout:g} s: raise engine_start_timeout in model.json"
                self.kill(late)
                raise EngineStartError(f"the engine process was {late}")
            message = self.receive()
        if isinstance(message, EngineReady):
            return message
        ended = None if self._stopped else self._group.wait_ended(self._number, _END_SECONDS)
        if ended is not None and ended.failure is not None:
            raise EngineStartError(ended.failure.message, ended.failure.fatal)
        if self.heartbeat.beats or self.heartbeat.ran():
            raise EngineStartError(f"the engine process died ({self.exit_text()})", lost=True)
        raise EngineStartError(f"the engine process exited while loading the model ({self.exit_text()})")

    def send(self, frame: bytes) -> None:
        """Raises OSError if the process is gone."""
        with self._sending:
            self._connection.send_bytes(frame)

    def receive(self) -> ToFrontend:
        """The next message.  Raises EOFError or OSError if the process is gone or sent an invalid frame."""
        try:
            return decode_to_frontend(self._connection.recv_bytes())
        except msgspec.DecodeError as error:
            self.kill(f"it sent an invalid frame: {error}")
            raise EOFError from None

    def watch_turns(self, told: Callable[[bool], None]) -> None:
        """Call `told`, now and after every change, with whether this frontend can send requests; it must not block."""
        self._group.watch_turns(told)

    def end_turn(self) -> None:
        """This frontend's requests are harmless: the next frontend can test its own."""
        self._group.end_turn(self._number)

    def exit_text(self) -> str:
        """How it ended, in a few words; or that it continues for the other stubs."""
        if self._stopped:
            return "it is no longer needed"
        ended = self._group.wait_ended(self._number, _END_SECONDS)
        return "it closed its pipe to this frontend, which read too little" if ended is None else ended.text

    def kill(self, reason: str) -> None:
        """Kill it, for all stubs; `exit_text` then says why."""
        self._group.kill(self._number, reason)

    def stop(self, polite: bool = True) -> None:
        """Leave it to the other stubs; it ends with the last one.  Safe to repeat.

        Args:
            polite: no effect: the daemon knows whether it is loading.
        """
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the pipe."""
        with self._sending:
            self._connection.close()
        self._socket.close()
