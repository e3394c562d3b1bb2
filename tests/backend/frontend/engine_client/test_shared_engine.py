"""Frontends that share an engine process: the actions and failures of one do not affect the others' requests."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import echo
from frontend_rig import FAKE_ENGINE, RecordingClient
from supervisor_rig import PROMPT, SupervisorRig, tokens, wait_for

from inflight.config import EngineConfig
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import REQUESTS_PER_FRONTEND
from inflight.frontend.engine_client.engine_process import EngineStartError
from inflight.frontend.engine_client.shared_engine import EngineGroup, SharedEngine


@pytest.fixture
def make_rigs(tmp_path: Path) -> Iterator[Callable[..., list[SupervisorRig]]]:
    """Makes three frontends, and stops them after the test."""
    made: list[SupervisorRig] = []

    def make(turn_seconds: float = 600.0, **config: Any) -> list[SupervisorRig]:
        """With turns longer than any test waits: they end for another reason."""
        control, name = tmp_path / "control.json", f"inflight-test-{uuid.uuid4().hex}"
        env = {"FAKE_ENGINE_CONTROL": str(control)}
        options = EngineConfig(model="fake", **config)
        for k in range(3):
            group = EngineGroup(options, FAKE_ENGINE, env, name, f"m_{k}", turn_seconds=turn_seconds)
            made.append(SupervisorRig(control, group, **config).start())
        return list(made)

    yield make
    for rig in made:
        rig.stop()


@pytest.fixture
def rigs(make_rigs: Callable[..., list[SupervisorRig]]) -> list[SupervisorRig]:
    return make_rigs()


def kill(rigs: list[SupervisorRig]) -> None:
    """Kill the engine process, and wait until all use the next one."""
    pid = rigs[0].supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(rig.supervisor.pid not in (None, pid) for rig in rigs))
    assert len({rig.supervisor.pid for rig in rigs}) == 1


def kill_and_send_in_turn(rigs: list[SupervisorRig]) -> list[bool]:
    """Kill the engine process under requests that hold; returns which frontends wait for their turns."""
    kill(rigs)
    wait_for(lambda: sum(rig.supervisor._send_buffer.paused for rig in rigs) == len(rigs) - 1)
    return [rig.supervisor._send_buffer.paused for rig in rigs]


def open_all(rigs: list[SupervisorRig], count: int, orders: str) -> list[RecordingClient]:
    return [rig.open(orders=orders, max_tokens=150 + k) for rig in rigs for k in range(count)]


def check_all(clients: list[RecordingClient], count: int) -> None:
    for number, client in enumerate(clients):
        assert client.wait().error is None
        assert tokens(client) == echo(PROMPT, 150 + number % count)


def test_all_streams_go_on_with_the_next_engine(rigs: list[SupervisorRig]) -> None:
    clients = open_all(rigs, 4, "pause=8")
    for lives in range(1, 4):
        wait_for(lambda lives=lives: all(len(tokens(client)) == 8 * lives for client in clients))
        kill(rigs)
    rigs[0].order(go="")
    new = [rig.open(max_tokens=5) for rig in rigs]
    check_all(clients, 4)
    assert [tokens(client.wait()) for client in new] == [echo(PROMPT, 5)] * 3
    assert [rig.stats.deaths for rig in rigs] == [3, 3, 3]


def test_ids_say_which_frontend_a_request_came_from(rigs: list[SupervisorRig]) -> None:
    for number, rig in enumerate(rigs):
        client = rig.open(orders="delay=0.01", max_tokens=1000)
        (request_id,) = wait_for(lambda rig=rig: rig.supervisor._send_buffer.in_engine)
        assert request_id // REQUESTS_PER_FRONTEND == number
        client.cancelled = True
        client.wait()


@pytest.mark.parametrize(
    "orders",
    [("crash=20", "", ""), pytest.param(("crash=20", "crash=30", "crash=25"), marks=pytest.mark.nightly)],
    ids=["one", "each"],
)
def test_poison_of_one_frontend_fails_no_request_of_another(
    rigs: list[SupervisorRig], orders: tuple[str, str, str]
) -> None:
    clients = open_all(rigs, 6, "delay=0.001")
    poison = [rig.open(orders=order, max_tokens=100) for rig, order in zip(rigs, orders) if order]
    idle = rigs[-1].open(max_tokens=3)
    for client in poison:
        error = client.wait().error
        assert error is not None
        assert error[1].endswith("(signal 9, SIGKILL); it is not replayed again (max_replays=2)")
    check_all(clients, 6)
    assert tokens(idle.wait()) == echo(PROMPT, 3)
    assert [rig.stats.endings for rig in rigs] == [["poison"] if order else [] for order in orders]
    assert [tokens(rig.open(max_tokens=5).wait()) for rig in rigs] == [echo(PROMPT, 5)] * 3


@pytest.mark.parametrize(("beats", "lost"), [(0, False), (1, True)])
def test_an_engine_that_was_up_before_it_died_is_lost_and_no_failed_start(beats: int, lost: bool) -> None:
    """The poison of a quicker frontend killed it."""
    ours, theirs = socket.socketpair()
    descriptor = Heartbeat.create(1)
    heartbeat = Heartbeat(descriptor, 1)
    os.close(descriptor)
    for _ in range(beats):
        heartbeat.beat(1)
    group = SimpleNamespace(wait_ended=lambda number, seconds: None)
    engine = SharedEngine(group, 1, 1, ours, heartbeat)  # type: ignore[arg-type]
    theirs.close()
    with pytest.raises(EngineStartError) as caught:
        engine.wait_ready(20)
    assert caught.value.lost is lost
    ours.close()


def test_after_a_death_one_frontend_sends_at_a_time(rigs: list[SupervisorRig]) -> None:
    slow = [rig.open(orders="hold=1", max_tokens=4) for rig in rigs]
    wait_for(lambda: all(client.responses for client in slow))
    waiting = kill_and_send_in_turn(rigs)
    new = rigs[waiting.index(True)].open(max_tokens=3)
    assert not new.responses
    rigs[0].order(go="")
    for client in [*slow, new]:
        assert client.wait().error is None
    wait_for(lambda: not any(rig.supervisor._send_buffer.paused for rig in rigs))


def test_a_trial_comes_in_its_frontends_turn_and_the_others_keep_their_requests_back(rigs: list[SupervisorRig]) -> None:
    """So the suspect is alone in the engine; streams of the other frontends wait for the end of the search."""
    held: list[Callable[[], None]] = []
    recall = rigs[0].supervisor.recall
    rigs[0].supervisor.recall = lambda emptied: recall(lambda: held.append(emptied))  # type: ignore[method-assign]
    clients = open_all(rigs, 2, "follow=8")
    wait_for(lambda: all(client.responses for client in clients))
    poison = rigs[0].open(orders="delay=0.002,crash=3", max_tokens=100)
    wait_for(lambda: held)
    assert [rig.supervisor._send_buffer.paused for rig in rigs] == [False, True, True]
    assert not any(rig.supervisor._send_buffer.in_engine for rig in rigs)
    rigs[0].order(go="")
    held.pop()()
    error = poison.wait().error
    assert error is not None and "4 times in a row" in error[1]
    check_all(clients, 2)
    assert [rig.stats.endings for rig in rigs] == [["poison"], [], []]


def test_a_frontend_that_goes_away_in_its_turn_gives_it_up(rigs: list[SupervisorRig]) -> None:
    slow = [rig.open(orders="hold=1", max_tokens=4) for rig in rigs]
    wait_for(lambda: all(client.responses for client in slow))
    turn = kill_and_send_in_turn(rigs).index(False)
    gone = rigs.pop(turn)
    gone.stop()
    rigs[0].order(go="")
    slow.pop(turn)
    for client in slow:
        assert tokens(client.wait()) == echo(PROMPT, 4)


def test_a_turn_ends_in_time(make_rigs: Callable[..., list[SupervisorRig]]) -> None:
    rigs = make_rigs(turn_seconds=0.2)
    slow = [rig.open(orders="hold=1", max_tokens=2) for rig in rigs[:2]]
    wait_for(lambda: all(client.responses for client in slow))
    kill(rigs)
    assert tokens(rigs[2].open(max_tokens=5).wait()) == echo(PROMPT, 5)
    assert not any(client.ended.is_set() for client in slow)


def test_one_that_stops_takes_only_its_own_requests_along(rigs: list[SupervisorRig]) -> None:
    clients = open_all(rigs, 2, "hold=8")
    wait_for(lambda: all(client.responses for client in clients))
    pid = rigs[0].supervisor.pid
    rigs[0].stop()
    rigs[1].order(go="")
    for client in clients[:2]:
        error = client.wait().error
        assert error is not None
        assert error[0] == "UNAVAILABLE"
    check_all(clients[2:], 2)
    assert rigs[1].supervisor.pid == pid
    assert [rig.stats.deaths for rig in rigs] == [0, 0, 0]


def test_a_restart_that_fails_is_known_to_all_and_ends(rigs: list[SupervisorRig]) -> None:
    rigs[0].order(start="fail")
    pid = rigs[0].supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for rig in rigs:
        reason = wait_for(lambda rig=rig: rig.supervisor.refusal)
        assert reason.endswith("told to fail")
    rigs[0].order()
    for rig in rigs:
        wait_for(lambda rig=rig: rig.supervisor.pid)
        assert tokens(rig.open(max_tokens=5).wait()) == echo(PROMPT, 5)


def test_a_hang_under_one_frontends_request_is_detected_and_all_continue(rigs: list[SupervisorRig]) -> None:
    clients = open_all(rigs, 2, "hold=8")
    wait_for(lambda: all(client.responses for client in clients))
    pid = rigs[0].supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    rigs[0].order(go="")
    for rig in rigs:
        rig.watch(0.5)
    wait_for(lambda: all(rig.stats.deaths for rig in rigs))
    for rig in rigs:
        rig.watch(600)  # the next engine is only slow
    check_all(clients, 2)
    assert any("did not finish a step" in line for line in rigs[1].lines)
