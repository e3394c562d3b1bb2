"""An engine process that SIGKILL does not end, because it waits for a disk that hangs, holds nothing up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from model_entries import SMALL
from supervisor_rig import wait_for

from inflight.config import EngineConfig
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import EngineFailed, EngineReady, ToFrontend, encode
from inflight.frontend.engine_client import engine_process, shared_engine, shared_engine_daemon
from inflight.frontend.engine_client.engine_process import EngineProcess
from inflight.frontend.engine_client.os_process import UNKNOWN_STATUS, ForkedProcess
from inflight.frontend.engine_client.shared_engine import EngineGroup
from inflight.frontend.engine_client.shared_engine_daemon import SharedEngineDaemon
from inflight.frontend.engine_client.supervisor import Supervisor

READY = EngineReady(256, 199, [0], 100, 16, "float32", "cpu", "fake", 0.1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_EXIT_SECONDS", 0.2)
    monkeypatch.setattr(shared_engine, "_LEAVE_SECONDS", 0.0)
    monkeypatch.setattr(shared_engine_daemon, "_EXIT_SECONDS", 0.1)
    monkeypatch.setattr(shared_engine_daemon, "_KILL_SECONDS", 0.1)


class Unkillable:
    """Implements `OsProcess`; its end of the pipe stays open."""

    pid = 1

    def __init__(self, pipe: int, heartbeat: int) -> None:
        self.pipe, self.killed, self.closed = os.dup(pipe), 0, False

    def say(self, message: ToFrontend) -> None:
        frame = encode(message)
        os.write(self.pipe, len(frame).to_bytes(4, "big") + frame)

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "for ever"
        raise subprocess.TimeoutExpired("engine", timeout)

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(EngineConfig.from_dict(SMALL), Unkillable)
    yield process
    process.close()
    os.close(unkillable(process).pipe)


def unkillable(engine: EngineProcess) -> Unkillable:
    process = engine._process
    assert isinstance(process, Unkillable)
    return process


@pytest.mark.parametrize("polite", [True, False])
def test_it_is_left_when_it_is_stopped(engine: EngineProcess, polite: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine.stop(polite)
    assert unkillable(engine).killed == 1
    with pytest.raises(EOFError):
        engine.receive()
    assert "has not ended 0.2 s later" in caplog.text


def test_what_it_had_sent_is_read_after_it_was_killed(engine: EngineProcess) -> None:
    """Then its pipe ends, so that the next engine starts, and the cause of the death is known."""
    unkillable(engine).say(EngineFailed("a step failed"))
    engine.kill("it did not finish a step")
    assert engine.receive() == EngineFailed("a step failed")
    with pytest.raises(EOFError):
        engine.receive()
    engine.failure = None
    assert engine.exit_text() == "it closed its pipe and hung"
    engine.failure = EngineFailed("it did not finish a step")
    assert engine.exit_text() == "it did not finish a step"


@pytest.mark.parametrize("loads", [True, False])
def test_an_unload_waits_for_it_once(loads: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Not again in the supervisor's thread, which sees the end of its pipe then."""
    config, made = EngineConfig.from_dict(SMALL), list[EngineProcess]()

    def launch() -> EngineProcess:
        made.append(EngineProcess(config, Unkillable))
        if not loads:
            unkillable(made[0]).say(READY)
        return made[0]

    supervisor = Supervisor(config, lambda level, line: None, launch=launch)
    supervisor.begin()
    if loads:
        wait_for(lambda: supervisor._engine_process)
    else:
        supervisor.wait_until_ready()
        supervisor.connect(Mock())
    supervisor.stop()
    assert len(caplog.records) == 1
    process = unkillable(made[0])
    assert process.killed == 1
    assert process.closed
    os.close(process.pipe)


def test_a_fork_that_is_left_keeps_no_descriptors() -> None:
    owned, owner = os.pipe()
    report, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:  # it does not end
        pidfd = os.pidfd_open(cat.pid)
        process = ForkedProcess(cat.pid, pidfd, owner, report)
        process.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)
        process.close()
        process.kill()
        assert process.poll() == process.wait() == UNKNOWN_STATUS
        assert cat.poll() is None
        cat.communicate()
    assert report.fileno() == -1
    assert os.read(owned, 1) == b"", "the other end is closed"
    os.close(owned)


class Shared:
    """A stub whose daemon runs in a thread of this process, and starts what SIGKILL does not end."""

    def __init__(self) -> None:
        self.processes: list[Unkillable] = []
        config = EngineConfig.from_dict(SMALL)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0inflight-test-{uuid.uuid4().hex}")
        self.listener.listen()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(20)
        size = Heartbeat.size(config.max_num_seqs)
        self.daemon = SharedEngineDaemon(self.listener, theirs, [], [], b"", size, 30.0, False)
        self.thread = threading.Thread(target=self.daemon.run, daemon=True)
        self.thread.start()
        self.group = EngineGroup(config, [sys.executable], {}, "", "m_0")
        assert self.group._is_member(ours)

    def start(self, command: list[str], pass_fds: list[int], stdin: int) -> Unkillable:
        self.processes.append(Unkillable(*pass_fds[:2]))
        return self.processes[-1]

    def close(self) -> None:
        """Once its thread has ended."""
        self.daemon._selector.close()
        for end in (self.listener, *self.daemon._sockets, *(member.end for member in self.daemon._leaving)):
            end.close()
        os.close(self.daemon._demand)
        for process in self.processes:
            os.close(process.pipe)


def test_it_is_left_by_the_stubs_that_share_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They get the next engine beside it, and their daemon ends with the last of them."""
    monkeypatch.setattr(shared_engine_daemon, "signal", Mock())
    shared = Shared()
    monkeypatch.setattr(shared_engine_daemon, "ChildProcess", shared.start)
    engine = shared.group.launch()
    shared.processes[0].say(READY)
    engine.kill("it did not finish a step")
    assert engine._connection.poll(20)
    with pytest.raises(EOFError):
        engine.receive()
    assert engine.exit_text() == "it did not finish a step"
    engine.close()
    assert "has not ended: a disk" in capfd.readouterr().err
    with pytest.raises(BrokenPipeError):
        shared.processes[0].say(READY)
    assert shared.processes[0].closed

    following = shared.group.launch()
    assert len(shared.processes) == 2
    following.stop()
    following.close()
    shared.group.leave()
    shared.thread.join(20)
    assert not shared.thread.is_alive()
    assert [process.closed for process in shared.processes] == [True, True]
    shared.close()


def test_it_is_left_if_the_daemon_is_gone() -> None:
    """Killed with it, it keeps its pipes open, and no daemon says that it is left."""
    group = EngineGroup(EngineConfig.from_dict(SMALL), [], {}, "", "m_0")
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    group._latest = 1, ours
    group.kill(1, "it did not finish a step")
    assert ours.recv(1) == b""
    ours.close()
    theirs.close()
