"""An heir does the later work of a fork server: forks do not wait for it, and the next ones have it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes_of import pipes_and_sockets
from supervisor_rig import alive, wait_for

from inflight.config import EngineConfig
from inflight.frontend.engine_client.engine_launcher import EngineLauncher
from inflight.frontend.engine_client.os_process import OsProcess

SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "heir_server.py")]


class Fork:
    """A process of `heir_server.py`, and its first line in parts."""

    def __init__(self, launcher: EngineLauncher) -> None:
        self.pipe, theirs = socket.socketpair()
        heartbeat = os.memfd_create("heartbeat")
        with theirs:
            self.process: OsProcess = launcher._fork(theirs.fileno(), heartbeat)
        os.close(heartbeat)
        self.has, self.knows_demand = self.line().split()

    @property
    def parent(self) -> int:
        return psutil.Process(self.process.pid).ppid()

    def line(self) -> str:
        self.pipe.settimeout(30)
        with self.pipe.makefile() as lines:
            return lines.readline()

    def ask_for_a_grammar(self) -> None:
        self.pipe.sendall(b"g")
        assert self.line() == "asked\n"

    def close(self) -> None:
        self.pipe.close()
        self.process.wait(30)


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("began", "go_on"):
            os.mkfifo(folder / name)
        self.launcher = EngineLauncher(EngineConfig(model="m"), SERVER, {"HEIR_FOLDER": str(folder)})
        self.forks: list[Fork] = []

    @property
    def server(self) -> int:
        server = self.launcher._fork_server
        assert server is not None
        return server.pid

    def fork(self) -> Fork:
        self.forks.append(Fork(self.launcher))
        return self.forks[-1]

    def heir(self) -> int:
        """Its process id, once it has begun and waits."""
        return int((self.folder / "began").read_text())

    def let_go_on(self) -> None:
        (self.folder / "go_on").write_text("")

    def fork_of(self, parent: int) -> Fork:
        """The first fork of this process: an heir takes over when its parent has read its word."""

        def last() -> bool:
            self.fork()
            return self.forks[-1].parent == parent

        wait_for(last)
        return self.forks[-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.launcher.close()
    for fork in place.forks:
        fork.close()


def test_forks_do_not_wait_for_a_vocabulary_that_is_being_read(place: Place) -> None:
    """On busy cores that takes long, and an engine can die meanwhile; the heir forks when it has read it."""
    place.fork().ask_for_a_grammar()
    heir = place.heir()
    beside = [place.fork() for _ in range(2)]
    assert [(fork.has, fork.parent) for fork in beside] == [("plain", place.server)] * 2
    place.let_go_on()
    after = place.fork_of(heir)
    assert (after.has, after.knows_demand) == ("more", "True")
    assert place.fork().parent == heir, "there is no heir after it"
    assert len(pipes_and_sockets(after.process.pid)) == len(pipes_and_sockets(beside[0].process.pid))
    for fork in (beside[0], after):
        os.kill(fork.process.pid, signal.SIGKILL)
        assert fork.process.wait(30) == -signal.SIGKILL, "each is reported by the one that has forked it"


def test_an_heir_that_is_killed_leaves_the_forks_to_its_parent(place: Place) -> None:
    place.fork().ask_for_a_grammar()
    os.kill(place.heir(), signal.SIGKILL)
    assert place.fork().parent == place.server


def test_one_that_is_killed_when_it_has_taken_over_does_too(place: Place) -> None:
    place.fork().ask_for_a_grammar()
    heir = place.heir()
    place.let_go_on()
    place.fork_of(heir)
    os.kill(heir, signal.SIGKILL)
    wait_for(lambda: not alive(heir))
    assert place.fork().parent == place.server
    place.fork().ask_for_a_grammar()
    assert place.fork().parent == place.server, "and there is no other"


@pytest.mark.parametrize("is_done", [False, True])
def test_heirs_end_with_their_fork_server(place: Place, is_done: bool) -> None:
    first = place.fork()
    first.ask_for_a_grammar()
    heir = place.heir()
    if is_done:
        place.let_go_on()
        place.fork_of(heir)
    place.launcher.close()
    wait_for(lambda: not alive(heir))
    assert alive(first.process.pid)


@pytest.mark.parametrize("is_done", [False, True])
def test_heirs_end_when_the_owner_retires_their_fork_server(place: Place, is_done: bool) -> None:
    first = place.fork()
    first.ask_for_a_grammar()
    heir, server = place.heir(), place.launcher._fork_server
    assert server is not None
    if is_done:
        place.let_go_on()
        place.fork_of(heir)
    server.retire()
    if is_done:
        assert alive(heir), "its forks have not ended"
    for fork in place.forks:
        fork.close()
    wait_for(lambda: not alive(heir) and server.has_ended)


def test_a_successor_learns_that_grammars_are_used(place: Place) -> None:
    """From an engine that is no fork of it."""
    engine, launcher = place.fork(), place.launcher
    assert engine.knows_demand == "False"
    outdated = launcher._fork_server
    assert outdated is not None
    outdated.is_outdated = True
    wait_for(lambda: launcher.keep_fork_server() is None and launcher._fork_server is not outdated)
    assert place.fork().knows_demand == "False"
    engine.ask_for_a_grammar()
    assert place.fork().knows_demand == "True"
    assert psutil.Process(place.heir()).ppid() == place.server
