"""A spare engine process that waits to take over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import echo
from supervisor_rig import PROMPT, SupervisorRig, alive, tokens, wait_for

from inflight.frontend.engine_client import supervisor


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorRig]:
    monkeypatch.setattr(supervisor, "_SPARE_AFTER", 0.0)
    rig = SupervisorRig(tmp_path / "control.json", spare_engine=True, engine_timeout=0.4).start()
    yield rig
    rig.stop()


def spare_pids(rig: SupervisorRig, count: int = 1) -> list[int]:
    wait_for(lambda: len(rig.supervisor._launcher._spares) == count)
    return [spare.pid for spare in rig.supervisor._launcher._spares]


def spare_pid(rig: SupervisorRig) -> int:
    return spare_pids(rig)[0]


def test_the_spare_takes_over_and_another_waits_in_its_place(rig: SupervisorRig) -> None:
    client = rig.open(orders="delay=0.002", max_tokens=500)
    for _ in range(2):
        spare, old = spare_pid(rig), rig.supervisor.pid
        assert old is not None
        seen = len(client.responses)
        wait_for(lambda seen=seen: len(client.responses) > seen)
        os.kill(old, signal.SIGKILL)
        wait_for(lambda old=old: rig.supervisor.pid not in (None, old))
        assert rig.supervisor.pid == spare
    assert tokens(client.wait()) == echo(PROMPT, 500)
    assert spare_pid(rig) != rig.supervisor.pid


def test_a_spare_that_has_died_is_not_waited_for(rig: SupervisorRig) -> None:
    spare, old = spare_pid(rig), rig.supervisor.pid
    assert old is not None
    os.kill(spare, signal.SIGKILL)
    wait_for(lambda: not alive(spare))
    os.kill(old, signal.SIGKILL)
    assert tokens(rig.open(max_tokens=4).wait()) == echo(PROMPT, 4)
    assert rig.supervisor.pid not in (None, old, spare)


def test_while_a_request_may_kill_more_engines_two_spares_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SPARE_AFTER", 0.0)
    rig = SupervisorRig(tmp_path / "control.json", spare_engine=True, engine_timeout=60).start()
    rig.supervisor._watchdog.interval = 0.05
    try:
        first, old = spare_pid(rig), rig.supervisor.pid
        assert old is not None
        client = rig.open(orders="stop=1", max_tokens=3)
        wait_for(lambda: client.responses)
        os.kill(old, signal.SIGKILL)
        spares = spare_pids(rig, 2)  # the replay has stopped its engine, so the search goes on
        assert rig.supervisor.pid == first
        os.kill(first, signal.SIGCONT)
        assert tokens(client.wait()) == echo(PROMPT, 3)
        assert spare_pid(rig) in spares
    finally:
        rig.stop()


def test_the_spare_ends_with_the_supervisor(rig: SupervisorRig) -> None:
    spare = spare_pid(rig)
    rig.stop()
    assert not alive(spare)


def test_without_the_option_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SPARE_AFTER", 0.0)
    rig = SupervisorRig(tmp_path / "control.json", engine_timeout=0.4).start()
    checked = rig.supervisor._watchdog._checked
    wait_for(lambda: rig.supervisor._watchdog._checked > checked + 0.3)
    assert not rig.supervisor._launcher._spares
    rig.stop()
