"""An engine process that SIGKILL does not end, because it waits for a disk that hangs, holds nothing up."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from model_entries import SMALL
from supervisor_rig import wait_for

from inflight.config import EngineConfig
from inflight.engine.messages import EngineFailed, EngineReady, ToFrontend, encode
from inflight.frontend.engine_client import engine_process
from inflight.frontend.engine_client.engine_process import EngineProcess
from inflight.frontend.engine_client.os_process import UNKNOWN_STATUS, ForkedProcess
from inflight.frontend.engine_client.supervisor import Supervisor

READY = EngineReady(256, 199, [0], 100, 16, "float32", "cpu", "fake", 0.1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_EXIT_SECONDS", 0.2)


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
