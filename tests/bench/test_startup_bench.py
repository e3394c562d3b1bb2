"""bench/startup.py ends with an error where it would wait for ever, and counts the forks of a spare process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import startup

from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats, TokenColumns
from inflight.engine.messages import StepMessage


class Engine:
    """Sends these messages."""

    def __init__(self, *messages: Any) -> None:
        self._connection, self._theirs = Pipe()
        for message in messages:
            self._theirs.send(message)

    def send(self, frame: bytes) -> None:
        assert frame

    def receive(self) -> Any:
        return self._connection.recv()


FAILED = RequestFailed(1, "INVALID_ARG", "the grammar is too large")


@pytest.mark.parametrize(
    "messages", [[FAILED], [StepMessage([], StepStats(*[0] * 10, 0.0), failed=[FAILED])]], ids=["alone", "step"]
)
def test_a_request_that_fails_ends_the_benchmark(messages: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="a request failed: the grammar is too large"):
        startup.ask_for_digits(Engine(*messages))


def test_an_engine_that_sends_nothing_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "MOST_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="has sent nothing"):
        startup.ask_for_digits(Engine())


@pytest.mark.parametrize("first", ["delta", "columns"])
def test_the_time_to_a_token_ends_with_the_first_one(first: str) -> None:
    """Whichever part of a step's message it is in."""
    stats = StepStats(*[0] * 10, 0.0)
    none = StepMessage([], stats)
    of_delta = StepMessage([SequenceDelta(1, 0, [7])], stats)
    of_columns = StepMessage([], stats, TokenColumns([1], [0], [8]))
    engine = Engine(none, *([of_delta, of_columns] if first == "delta" else [of_columns, of_delta]), none)
    startup.until_a_token(engine)
    left = engine.receive()
    assert left == (of_columns if first == "delta" else of_delta)


def test_memory_that_never_settles_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, memory = itertools.count(), itertools.count(step=5)
    time = SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=lambda seconds: None)
    monkeypatch.setattr(startup, "time", time)
    monkeypatch.setattr(startup, "pss", lambda pid, kind="Pss": float(next(memory)))
    with pytest.raises(RuntimeError, match="still changes after 300 s"):
        startup.settled([os.getpid()], 4.0)


def test_forks_of_forks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; os.fork() or os.fork(); print(flush=True); os.read(0, 1)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child:
        for _ in range(3):
            child.stdout.readline()
        found = startup.forks(child.pid)
        assert len(set(found)) == 2
        monkeypatch.setattr(startup, "pss", lambda pid, kind: 1.0)
        assert startup.total([child.pid, found[0]], "Pss") == 3.0
        child.stdin.close()


def test_a_thread_that_waits_for_a_core_has_memory_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare process reads on idle cores only: on busy ones its memory stays as it is, and is not all."""
    states = iter("SRRSSSSSS")
    clock = itertools.count()
    monkeypatch.setattr(
        startup, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=lambda seconds: None)
    )
    monkeypatch.setattr(startup, "forks", lambda pid: [])  # other tests may have left some
    monkeypatch.setattr(startup, "pss", lambda pid, kind="Pss": 1.0)
    monkeypatch.setattr(startup, "want_a_core", lambda pid: next(states) == "R")
    startup.settled([os.getpid()], 4.0)
    assert "".join(states) == "SSSS"  # four seconds after the last that wants one


def test_a_thread_that_runs_wants_a_core() -> None:
    assert startup.want_a_core(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        while startup.want_a_core(child.pid):  # until it waits for its input
            pass
        child.stdin.close()


def test_a_thread_that_has_ended_wants_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end between the listing and the look at it."""
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "0" / "stat"])
    assert not startup.want_a_core(os.getpid())
