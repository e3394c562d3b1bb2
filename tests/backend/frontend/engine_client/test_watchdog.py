"""An engine process that hangs is told from one that is busy or idle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import echo
from supervisor_rig import PROMPT, SupervisorRig, tokens, wait_for

from inflight.engine.deltas import StepStats
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.frontend.engine_client.watchdog import Watchdog


def stats(tokens: int, seconds: float) -> StepStats:
    return StepStats(1, 0, 0, 1, 9, 0, 0, tokens, 1, tokens, seconds)


class Watched:
    """A watchdog that is asked each second."""

    def __init__(self, timeout: float) -> None:
        self.dog = Watchdog(timeout)
        self.now = 1000.0

    def stuck_after(self, beats: int | None = 7, has_work: bool = True, num_tokens: int = 1, limit: int = 2000) -> int:
        """Seconds until it says so; `limit` if it does not."""
        self.dog.is_stuck(self.now, None, False, 0)
        for seconds in range(limit):
            if self.dog.is_stuck(self.now + seconds, beats, has_work, num_tokens):
                return seconds
        return limit


def test_a_process_without_a_heartbeat_is_stuck_if_there_is_work() -> None:
    watched = Watched(60.0)
    assert watched.stuck_after() == 600, "the model's speed is unknown"
    watched.dog.step_took(stats(4, 0.01))
    assert watched.stuck_after() == 60
    assert watched.stuck_after(has_work=False) == 2000
    assert watched.stuck_after(beats=None) == 2000
    assert watched.stuck_after(beats=0) == 2000, "it has no heart"


def test_large_steps_of_slow_models_have_more_time() -> None:
    watched = Watched(60.0)
    watched.dog.step_took(stats(100, 10.0))
    assert watched.stuck_after(num_tokens=10) == 60
    assert watched.stuck_after(num_tokens=1000) == 1000
    for _ in range(200):
        watched.dog.step_took(stats(100, 0.1))
    assert watched.stuck_after(num_tokens=1000) == 60
    watched.dog.step_took(stats(0, 5.0))  # an empty one


def test_each_beat_starts_the_time_anew() -> None:
    watched = Watched(4.0)
    watched.dog.step_took(stats(1, 0.01))
    assert not any(watched.dog.is_stuck(k, k // 3, True, 1) for k in range(1, 60))
    assert [watched.dog.is_stuck(60 + k, 20, True, 1) for k in range(6)] == [False] * 4 + [True] * 2


def test_time_between_distant_checks_does_not_count() -> None:
    dog = Watchdog(60.0)
    dog.step_took(stats(1, 0.01))
    assert not dog.is_stuck(0.0, 5, True, 1)
    assert not dog.is_stuck(1.0, 5, True, 1)
    assert not dog.is_stuck(5000.0, 5, True, 1)
    assert not dog.is_stuck(5001.0, 5, True, 1)


def test_a_heartbeat_says_what_runs() -> None:
    def row(slot: int, request_id: int, index: int) -> NewRow:
        return NewRow(slot, request_id, index, b"", 1, [], SamplingParams(), 0)

    page = Heartbeat.create(4)
    ours, theirs = Heartbeat(page, 4), Heartbeat(page, 4)
    os.close(page)
    large = 5 * 2**36 + 17  # as of the sixth of several frontends
    assert (ours.beats, ours.ran()) == (0, {})
    theirs.beat(3)
    assert ours.num_live == 3
    theirs.launched(SchedulerOutput(num_tokens=9, new_rows=[row(0, 0, 0), row(1, large, 127), row(3, large, 0)]))
    assert (ours.beats, ours.num_tokens, ours.ran()) == (1, 9, {0: {0}, large: {0, 127}})
    theirs.launched(SchedulerOutput(num_tokens=1, preempted=[3], new_rows=[row(0, 8, 2)]))
    assert ours.ran() == {8: {2}, large: {127}}
    theirs.adding(0)
    assert ours.ran() == {0: set()}
    theirs.adding(None)
    assert ours.ran() == {8: {2}, large: {127}}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SupervisorRig]:
    rig = SupervisorRig(tmp_path / "control.json").start()
    rig.open(max_tokens=3).wait()
    yield rig
    rig.stop()


def killed(rig: SupervisorRig) -> None:
    """Wait until an engine that hangs is killed; one that is only slow is not."""
    deaths = rig.stats.deaths
    rig.watch(0.4)
    wait_for(lambda: rig.stats.deaths > deaths)
    rig.watch(600)


def test_a_stopped_engine_is_killed_and_its_streams_go_on(rig: SupervisorRig) -> None:
    clients = [rig.open(orders="hold=8", max_tokens=200 + k) for k in range(5)]
    wait_for(lambda: all(client.responses for client in clients))
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    rig.order(go="")
    killed(rig)
    for k, client in enumerate(clients):
        assert tokens(client.wait()) == echo(PROMPT, 200 + k)
    assert rig.supervisor.pid != pid
    reason = "the engine process died (it did not finish a step in 0.4 s (engine_timeout)); it is being restarted"
    assert f"{reason}; requests that continue in the next one: 5" in rig.lines


def test_an_idle_engine_is_left_alone_and_one_that_was_stopped_idle_is_replaced(rig: SupervisorRig) -> None:
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    rig.watch(0.4)
    dog = rig.supervisor._watchdog
    checked = dog._checked
    wait_for(lambda: dog._checked > checked + 1)
    assert rig.supervisor.pid == pid
    client = rig.open(max_tokens=4)
    killed(rig)
    assert tokens(client.wait()) == echo(PROMPT, 4)
    assert rig.supervisor.pid != pid


def test_a_question_to_a_stopped_engine_is_work_too(rig: SupervisorRig) -> None:
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    question = rig.ask()
    rig.watch(0.4)
    error = question.exception(timeout=60)
    assert "did not finish a step in 0.4 s" in str(error)


def test_a_request_that_hangs_every_engine_fails_alone(rig: SupervisorRig) -> None:
    other = rig.open(orders="follow=8", max_tokens=300)
    poison = rig.open(orders="stop=2", max_tokens=10)
    for _ in range(4):
        wait_for(rig.is_stopped)
        killed(rig)
    rig.order(go="")
    error = poison.wait().error
    assert error is not None
    assert "(it did not finish a step in 0.4 s (engine_timeout)); it is not replayed again (max_replays=2)" in error[1]
    assert tokens(other.wait()) == echo(PROMPT, 300)
