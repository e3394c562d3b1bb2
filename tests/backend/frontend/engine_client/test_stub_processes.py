"""Stubs that are processes of their own share an engine: one starts it, any may die, and nothing is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from frontend_rig import FAKE_ENGINE
from shared_engine_rig import CONFIG, Place, alive, wait_for

from inflight.frontend.engine_client.shared_engine import EngineGroup

_STUB = """
import json, os, sys
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[1])
from inflight.config import EngineConfig
from inflight.frontend.engine_client.shared_engine import EngineGroup
config = EngineConfig(model="fake", spare_engine=False)
group = EngineGroup(config, json.loads(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:6])
print("here", flush=True)
input()
engine = group.launch()
print(engine.pid, group.number, group._process.pid if group._process else 0, flush=True)
ready = engine.wait_ready(60)
print("ready", flush=True)
for line in sys.stdin:
    group.leave()
    print("left", flush=True)
    break
"""


class Stub:
    """A process that joins the group when told to."""

    def __init__(self, place: Place, instance: str) -> None:
        env = {"FAKE_ENGINE_CONTROL": str(place.control)}
        arguments = [json.dumps(sys.path), json.dumps(FAKE_ENGINE), json.dumps(env), place.name, instance]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STUB, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "here"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def joined(self) -> tuple[int, int, int]:
        """Process id of the engine, number of this stub, process id of the daemon if this stub started it."""
        engine, number, daemon = map(int, self.line().split())
        return engine, number, daemon

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def stubs(place: Place) -> Iterator[list[Stub]]:
    stubs = [Stub(place, f"m_{k}") for k in range(3)]
    yield stubs
    for stub in stubs:
        stub.kill()
    wait_for(lambda: not place.processes())


def test_stubs_that_start_at_once_get_one_engine(place: Place, stubs: list[Stub]) -> None:
    for stub in stubs:
        stub.go()
    joined = [stub.joined() for stub in stubs]
    assert len({engine for engine, _, _ in joined}) == 1
    assert sorted(number for _, number, _ in joined) == [0, 1, 2]
    assert sum(daemon > 0 for _, _, daemon in joined) == 1


def test_the_engine_outlives_the_stub_that_started_it(place: Place, stubs: list[Stub]) -> None:
    stubs[0].go()
    engine, _, daemon = stubs[0].joined()
    assert daemon
    for stub in stubs[1:]:
        stub.go()
        assert stub.joined()[0] == engine
    stubs[0].kill()
    assert [stub.line() for stub in stubs[1:]] == ["ready"] * 2
    stubs[1].kill()
    assert alive(engine)
    stubs[2].go()
    assert stubs[2].line() == "left"
    assert not alive(engine)


@pytest.mark.parametrize("state", ["loading", "stopped", "serving"])
def test_when_all_stubs_are_killed_nothing_is_left(place: Place, stubs: list[Stub], state: str) -> None:
    if state == "loading":
        place.order(start="hang")
    for stub in stubs:
        stub.go()
    engine = {stub.joined()[0] for stub in stubs}.pop()
    if state == "stopped":
        os.kill(engine, signal.SIGSTOP)
    for stub in stubs:
        os.kill(stub.process.pid, signal.SIGKILL)
    wait_for(lambda: not place.processes())


def test_when_the_starter_dies_during_loading_the_others_continue(place: Place, stubs: list[Stub]) -> None:
    place.order(start="hang")
    stubs[0].go()
    loading, _, _ = stubs[0].joined()
    for stub in stubs[1:]:
        stub.go()
        assert stub.joined()[0] == loading
    stubs[0].kill()
    assert alive(loading)


def _found_and_leave(name: str, barrier: Any, results: Any) -> None:
    group = EngineGroup(CONFIG, FAKE_ENGINE, {}, name, multiprocessing.current_process().name)
    barrier.wait()
    engine = group.launch()
    results.put(engine.pid)
    barrier.wait()
    group.leave()


@pytest.mark.parametrize("races", [12, pytest.param(50, marks=pytest.mark.nightly)])
def test_races_have_one_winner_each(place: Place, races: int) -> None:
    """Stubs that meet, leave, and meet again under the same name, without a pause between."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    for race in range(races):
        racers = [
            context.Process(target=_found_and_leave, args=(place.name, barrier, results), name=f"m_{k}")
            for k in range(3)
        ]
        for racer in racers:
            racer.start()
        assert len({results.get(timeout=20) for _ in racers}) == 1, race
        for racer in racers:
            racer.join(20)
            assert racer.exitcode == 0
