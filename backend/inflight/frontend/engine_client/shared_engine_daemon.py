"""The daemon: a small process that owns the engine process of several stubs.  Only the standard library.

    stub ─join, engine, settled, kill, tell──▶ daemon ──▶ starts, reaps and ends the engine process
    stub ◀─joined, engine + pipe, turn, ended─ daemon        (PR_SET_PDEATHSIG: it never outlives the daemon)

The first stub starts the daemon, which depends on none of them.  It ends the engine process, and then itself, when the
last stub has left or died.  The death of a stub affects no other, and all are told how an engine process ended.
Once an engine process is loaded, a spare process is prepared on idle cores, and the next engine process is its fork.

Packets are JSON on Unix sockets (SOCK_SEQPACKET); `frontend/engine_client/shared_engine.py` is the other side.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from inflight.frontend.engine_client.fork_server_process import ForkFailed, ForkServerProcess
from inflight.frontend.engine_client.os_process import UNKNOWN_STATUS, ChildProcess, ForkedProcess, OsProcess
from inflight.grammars.demand import new_demand

__all__ = ["MAX_PACKET", "SEND", "SharedEngineDaemon", "main", "peer_uid"]

MAX_PACKET = 150_000
_EXIT_SECONDS = 5.0  # for the engine process to exit after its pipe was closed, and then once more after SIGKILL
_KILL_SECONDS = 10.0  # for one that stubs use to end after SIGKILL
_SPARE_SECONDS = 1.0  # between two looks at the spare process
_START_SECONDS = 30.0  # for the first stub to join
SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def peer_uid(end: socket.socket) -> int:
    """User id of the process at the other end (of the listening process, if `end` was connected to it)."""
    _, uid, _ = struct.unpack("iII", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return int(uid)


@dataclass(eq=False)
class _Member:
    """A stub.

    Attributes:
        number: of this frontend at the engine; None until it has joined.
        engine: the number of the last engine process that it was given; 0: none.
    """

    end: socket.socket
    number: int | None = None
    engine: int = 0

    def send(self, packet: dict[str, Any], *descriptors: int) -> bool:
        """Returns False if it is gone or has stopped reading."""
        try:
            socket.send_fds(self.end, [json.dumps(packet).encode()], descriptors, SEND)
        except OSError:
            return False
        return True


@dataclass(eq=False)
class _Engine:
    """An engine process.

    Attributes:
        number: counts them, from 1.
        heartbeat: descriptor of its shared memory (`engine/heartbeat.py`).
        loading: it has sent nothing yet, and reads nothing.
        last_words: its last complete frame.
        killed: why the daemon killed it.
        left_at: `time.monotonic()` seconds from which it counts as ended, whether or not it has; None: not killed.
    """

    number: int
    process: OsProcess
    pipe: socket.socket
    heartbeat: int
    loading: bool = True
    last_words: bytes = b""
    killed: str | None = None
    left_at: float | None = None
    _received: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read what it sent (frames of `multiprocessing`); False at the end."""
        try:
            data = self.pipe.recv(2**16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += data
        while len(self._received) >= 4:
            end = 4 + int.from_bytes(self._received[:4], "big")
            if len(self._received) < end:
                break
            self.last_words, self.loading = bytes(self._received[4:end]), False
            del self._received[:end]
        return bool(data)

    def kill(self, reason: str | None, seconds: float) -> None:
        """SIGKILL.  A process that waits for a disk that hangs ends only when the disk answers: it is left."""
        self.killed = self.killed or reason
        self.left_at = self.left_at or time.monotonic() + seconds
        self.process.kill()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None or (self.left_at is not None and time.monotonic() >= self.left_at)

    def close(self) -> int:
        """Read its last words and close what is open of it; returns its exit status."""
        with contextlib.suppress(OSError):
            self.pipe.shutdown(socket.SHUT_RDWR)  # what it has sent is read, and then the end, even if it lives on
        while self.read():
            pass
        status = self.process.poll()
        if status is None:
            text = f"the engine process {self.process.pid} was killed, and has not ended: a disk or device that it"
            print(f"{text} waits for hangs.  It keeps its memory until then", file=sys.stderr, flush=True)
        self.process.close()
        self.pipe.close()
        os.close(self.heartbeat)
        return UNKNOWN_STATUS if status is None else status


class SharedEngineDaemon:
    """Serves the stubs of one group until the last one has left.

    Args:
        listener: where further stubs connect.
        first: the connection of the stub that started this process.
        command: of the engine process without `--shared --fd N`.
        wrapper: a command that runs another one and ties it to a parent process: `wrapper PID command`.
        config: the engine's first frame.
        heartbeat_bytes: size of its shared memory (`engine/heartbeat.py`).
        turn_seconds: seconds that a stub has after a death to try its requests again, alone.
        has_spare: whether there is a spare process.
    """

    def __init__(
        self,
        listener: socket.socket,
        first: socket.socket,
        command: list[str],
        wrapper: list[str],
        config: bytes,
        heartbeat_bytes: int,
        turn_seconds: float,
        has_spare: bool,
    ) -> None:
        self._listener = listener
        self._command, self._wrapper, self._config = command, wrapper, config
        self._heartbeat_bytes = heartbeat_bytes
        self._selector = selectors.DefaultSelector()
        self._members: list[_Member] = []
        self._instances: set[str] = set()  # names of all members so far
        self._leaving: list[_Member] = []  # members that wait for the end of the engine process
        self._engine: _Engine | None = None
        self._num_engines = 0
        self._has_spare = has_spare
        self._demand = new_demand()  # of grammars; an engine that is no fork of a spare process tells it, too
        self._spares: list[ForkServerProcess] = []  # the last one forks; those before it report how their forks end
        # After a death the members take turns to try their requests again; the first of these has the turn.
        self._unsettled: list[_Member] = []
        self._turn_seconds = turn_seconds
        self._turn_ends = 0.0  # `time.monotonic()` seconds, once the engine process is loaded
        self._closed = False  # accepts no more members
        self._deadline = time.monotonic() + _START_SECONDS
        wakes, wake = socket.socketpair()
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())
        self._sockets = wakes, wake
        self._selector.register(wakes, selectors.EVENT_READ, self._reap)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._admit(first)

    def run(self) -> None:
        """Returns when the engine process and all members are gone; the last sockets close with this process."""
        while self._members or self._engine is not None:
            if not self._members:
                self._end_engine()
            waits = [self._timeout(), _SPARE_SECONDS if self._keeps_spare() else None]
            if self._engine is not None and self._engine.left_at is not None:
                waits.append(self._engine.left_at - time.monotonic())
            for key, _ in self._selector.select(min((wait for wait in waits if wait is not None), default=None)):
                key.data()
            if self._engine is not None and self._engine.left_at is not None:
                self._reap()
        for spare in self._spares:
            spare.stop()

    def _timeout(self) -> float | None:
        joined = any(member.number is not None for member in self._members)
        if self._members and joined:
            return self._turn_timeout()
        left = self._deadline - time.monotonic()
        if left <= 0:
            for member in list(self._members):  # no stub has ever joined
                self._drop(member)
        return max(0.05, left)

    def _turn_timeout(self) -> float | None:
        if not self._unsettled or self._engine is None or self._engine.loading:
            return None
        left = self._turn_ends - time.monotonic()
        if left <= 0:  # the stub is stopped, or its requests take too long
            self._settle(self._unsettled[0])
            return 0.0
        return left

    # -- stubs -----------------------------------------------------------------------------

    def _accept(self) -> None:
        end, _ = self._listener.accept()
        if peer_uid(end) != os.geteuid():
            end.close()
            return
        self._admit(end)

    def _admit(self, end: socket.socket) -> None:
        member = _Member(end)
        self._members.append(member)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._receive(member))

    def _receive(self, member: _Member) -> None:
        if member not in self._members:
            return  # dropped meanwhile
        try:
            packet = json.loads(member.end.recv(MAX_PACKET) or b"null")
        except (OSError, ValueError):
            packet = None
        if packet is None:
            return self._drop(member)
        kind = packet["op"]
        if kind == "join":
            self._join(member, packet["instance"], packet["number"])
        elif kind == "engine":
            self._give_engine(member, {key: packet[key] for key in ("asked",) if key in packet})
        elif kind == "kill":
            if self._engine is not None and self._engine.number == packet["engine"]:
                self._engine.kill(packet["reason"], _KILL_SECONDS)
        elif kind == "settled":
            if packet["engine"] == self._num_engines and self._engine is not None:
                self._settle(member)
        elif kind == "tell":
            for other in self._members:
                if other is not member:
                    self._send(other, {"op": "told", "by": member.number, "text": packet["text"]})
        elif kind == "leave":
            self._remove(member)
            self._leaving.append(member)
            if self._members:
                self._leaving.remove(member)
                member.end.close()

    def _join(self, member: _Member, instance: str, number: int | None) -> None:
        """Accept a stub, or refuse one of another load of the model: its instance name has joined before, or other
        stubs have left already."""
        taken = {other.number for other in self._members}
        if number is None:
            number = next(number for number in range(len(taken) + 1) if number not in taken)
        if self._closed or instance in self._instances or number in taken:
            member.send({"op": "closed"})
            return self._drop(member)
        self._instances.add(instance)
        member.number = number
        self._send(member, {"op": "joined", "number": number, "daemon": os.getpid()})

    def _send(self, member: _Member, packet: dict[str, Any], *descriptors: int) -> None:
        if not member.send(packet, *descriptors):
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        if member in self._members:
            self._remove(member)
            member.end.close()

    def _remove(self, member: _Member) -> None:
        self._selector.unregister(member.end)
        self._members.remove(member)
        self._settle(member)
        self._closed = self._closed or member.number is not None
        self._deadline = time.monotonic() + _EXIT_SECONDS

    # -- the engine process ----------------------------------------------------------------

    def _give_engine(self, member: _Member, asked: dict[str, int]) -> None:
        """Send a pipe to the engine process, which is started if there is none.

        Args:
            asked: number of the member's question, for the answer; empty from a stub of an earlier version.
        """
        if self._engine is None:
            try:
                self._start()
            except OSError as error:
                text = f"cannot start the engine process: {error}"
                return self._send(member, {"op": "error", "text": text, **asked})
        engine = self._engine
        assert engine is not None
        theirs, pipe = socket.socketpair()
        with theirs, pipe:
            assert member.number is not None
            member.engine = engine.number
            with contextlib.suppress(OSError):  # it died: the stub sees the end of its pipe, and gets the reason
                socket.send_fds(engine.pipe, [member.number.to_bytes(4, "big")], [pipe.fileno()])
            packet = {
                "op": "engine",
                **asked,
                "engine": engine.number,
                "pid": engine.process.pid,
                "turn": self._has_turn(member),
            }
            self._send(member, packet, theirs.fileno(), engine.heartbeat)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            heartbeat = os.memfd_create("inflight-heartbeat")
            os.ftruncate(heartbeat, self._heartbeat_bytes)
            options = ["--shared", "--fd", str(theirs.fileno()), "--heartbeat-fd", str(heartbeat)]
            options += ["--demand-fd", str(self._demand)]
            command = [*self._wrapper, str(os.getpid()), *self._command, *options]
            try:
                process: OsProcess | None = self._fork(theirs.fileno(), heartbeat)
                if process is None:
                    shared = [theirs.fileno(), heartbeat, self._demand]
                    process = ChildProcess(command, pass_fds=shared, stdin=subprocess.DEVNULL)
            except OSError:
                ours.close()
                os.close(heartbeat)
                raise
        self._num_engines += 1
        self._engine = _Engine(self._num_engines, process, ours, heartbeat)
        self._selector.register(ours, selectors.EVENT_READ, self._listen)
        with contextlib.suppress(OSError):  # it died at once: `_reap` reports how
            ours.sendall(struct.pack("!i", len(self._config)) + self._config)

    def _fork(self, pipe: int, heartbeat: int) -> ForkedProcess | None:
        """A fork of the spare process; None if there is none that can."""
        spare = self._spares[-1] if self._spares else None
        if spare is None or spare.has_ended or not spare.is_ready:
            return None
        try:
            process = spare.fork(pipe, heartbeat, _EXIT_SECONDS)
        except (OSError, ForkFailed):
            return None
        ended = process.watch()  # it is no child of this process
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._forked_ended(ended))
        return process

    def _forked_ended(self, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        self._reap()

    def _keeps_spare(self) -> bool:
        """Have a spare process beside a loaded engine, and a new one for one that has died or is outdated.

        One that died during its imports is not replaced.
        """
        if not self._has_spare or self._engine is None or self._engine.loading:
            return False
        spare = self._spares[-1] if self._spares else None
        if spare is None or (spare.is_ready and (spare.has_ended or spare.is_outdated)):
            if spare is not None:
                spare.retire()
            self._spares = [spare for spare in self._spares if not spare.has_ended]
            with contextlib.suppress(OSError):
                command = [*self._command, "--shared"]
                self._spares.append(ForkServerProcess(self._config, command, {}, idle=True, demand=self._demand))
        return True

    def _listen(self) -> None:
        engine = self._engine
        if engine is None:
            return
        loading = engine.loading
        if not engine.read():
            self._selector.unregister(engine.pipe)
        if loading and not engine.loading:
            self._turn_ends = time.monotonic() + self._turn_seconds

    def _reap(self) -> None:
        """If the engine process has ended, or is left, tell its users how."""
        with contextlib.suppress(BlockingIOError):
            self._sockets[0].recv(4096, socket.MSG_DONTWAIT)
        engine = self._engine
        if engine is None or not engine.has_ended:
            return
        if engine.pipe in self._selector.get_map():
            self._selector.unregister(engine.pipe)
        status = engine.close()
        self._engine = None
        if not engine.loading:
            # The member with the turn keeps it; the other users of this process follow.
            users = [member for member in self._members if member.engine == engine.number]
            self._unsettled = self._unsettled[:1] + [user for user in users if user not in self._unsettled[:1]]
        words = base64.b64encode(engine.last_words).decode() if len(engine.last_words) < MAX_PACKET // 2 else ""
        packet = {
            "op": "ended",
            "engine": engine.number,
            "status": status,
            "words": words,
            "killed": engine.killed,
        }
        for member in list(self._members):
            if member.engine == engine.number:
                self._send(member, packet)

    def _has_turn(self, member: _Member) -> bool:
        return not self._unsettled or self._unsettled[0] is member

    def _settle(self, member: _Member) -> None:
        """A member's requests are harmless, or it is gone: the turn passes to the next member, or all can send."""
        if member not in self._unsettled:
            return
        self._unsettled.remove(member)
        self._turn_ends = time.monotonic() + self._turn_seconds
        for other in list(self._members):
            if self._engine is not None and other.engine == self._engine.number:
                packet = {"op": "turn", "engine": self._engine.number, "turn": self._has_turn(other)}
                self._send(other, packet)

    def _end_engine(self) -> None:
        """No member is left: close the pipe, wait, kill, wait."""
        self._closed = True
        engine = self._engine
        if engine is None:
            return
        if engine.loading or time.monotonic() >= self._deadline:
            engine.kill(None, _EXIT_SECONDS)
        else:
            with contextlib.suppress(OSError):
                engine.pipe.shutdown(socket.SHUT_WR)


def main() -> int:
    parser = argparse.ArgumentParser(description="Owns the engine process that several stubs share.")
    parser.add_argument("--listen", type=int, required=True, help="inherited socket on which it listens")
    parser.add_argument("--member", type=int, required=True, help="inherited connection of the first stub")
    args = parser.parse_args()
    # It ends only with its last stub: the stubs handle Ctrl-C and a stop of the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the engine process
    orders = json.load(sys.stdin)
    daemon = SharedEngineDaemon(
        socket.socket(fileno=args.listen),
        socket.socket(fileno=args.member),
        orders["command"],
        orders["wrapper"],
        base64.b64decode(orders["config"]),
        orders["heartbeat_bytes"],
        orders["turn_seconds"],
        orders["has_spare"],
    )
    daemon.run()
    return 0


if __name__ == "__main__":
    os._exit(main())  # at once: the last stub waits for it
