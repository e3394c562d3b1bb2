"""An engine process that SIGKILL does not end, because it waits for a disk that hangs, holds nothing up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from model_entries import SMALL

from inflight.config import EngineConfig
from inflight.engine.messages import EngineFailed, encode
from inflight.frontend.engine_client.engine_process import EngineProcess


class Unkillable:
    """Implements `OsProcess`; its end of the pipe stays open."""

    pid = 1

    def __init__(self, pipe: int, heartbeat: int) -> None:
        self.pipe, self.killed = os.dup(pipe), 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "for ever"
        raise subprocess.TimeoutExpired("engine", timeout)

    def kill(self) -> None:
        self.killed += 1


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
    assert "has not ended 5 s later" in caplog.text


def test_what_it_had_sent_is_read_after_it_was_killed(engine: EngineProcess) -> None:
    """Then its pipe ends, so that the next engine starts, and the cause of the death is known."""
    message = encode(EngineFailed("a step failed"))
    os.write(unkillable(engine).pipe, len(message).to_bytes(4, "big") + message)
    engine.kill("it did not finish a step")
    assert engine.receive() == EngineFailed("a step failed")
    with pytest.raises(EOFError):
        engine.receive()
    engine.failure = None
    assert engine.exit_text() == "it closed its pipe and hung"
    engine.failure = EngineFailed("it did not finish a step")
    assert engine.exit_text() == "it did not finish a step"
