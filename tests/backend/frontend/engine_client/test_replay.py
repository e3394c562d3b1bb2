"""Engine processes that die under requests: the supervisor, the streams and a fake engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import echo
from frontend_rig import RecordingClient
from supervisor_rig import PROMPT, SupervisorRig, tokens, wait_for


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SupervisorRig]:
    rig = SupervisorRig(tmp_path / "control.json").start()
    yield rig
    rig.stop()


def kill(rig: SupervisorRig) -> None:
    """Kill the engine process, and wait until it has been replaced."""
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.supervisor.pid not in (None, pid))


def test_streams_go_on_with_the_next_engine(rig: SupervisorRig) -> None:
    clients = [rig.open(orders="pause=8", stream=k % 3 != 0, n=1 + k % 2, max_tokens=300 + k) for k in range(9)]
    for lives in range(1, 4):
        wait_for(lambda lives=lives: all(len(tokens(clients[k])) == 8 * lives * (1 + k % 2) for k in range(9) if k % 3))
        kill(rig)
    rig.order(go="")
    new = rig.open(max_tokens=5)
    for k, client in enumerate(clients):
        assert client.wait().error is None
        counts: list[list[int]] = [[] for _ in range(1 + k % 2)]
        for response in client.responses:
            ids = iter(response["token_ids"].tolist())
            for sequence, count in zip(counts, response["token_counts"].tolist()):
                sequence += [next(ids) for _ in range(count)]
        assert counts == [echo(PROMPT, 300 + k)] * len(counts)
    assert tokens(new.wait()) == echo(PROMPT, 5)
    assert rig.stats.deaths == 3
    assert rig.stats.num_replayed == 27
    assert any("requests that continue in the next one: 9" in line for line in rig.lines)
    assert rig.supervisor._send_buffer.in_engine == set()


def poisoned(client: RecordingClient, cause: str, deaths: int) -> bool:
    reason = (
        f"the engine process died while it ran this request, {deaths} times in a row ({cause}); "
        "it is not replayed again (max_replays=2)"
    )
    return client.wait().error == ("INTERNAL", reason)


@pytest.mark.parametrize(("order", "cause"), [("crash", "signal 9, SIGKILL"), ("fail", "engine step failed: told to")])
def test_a_request_that_kills_every_engine_fails_alone(rig: SupervisorRig, order: str, cause: str) -> None:
    client = rig.open(orders=f"{order}=3", max_tokens=100)
    assert poisoned(client, cause, 3)
    assert tokens(client) == echo(PROMPT, 3)
    assert rig.stats.deaths == 3
    assert rig.stats.endings == ["poison"]
    assert tokens(rig.open(max_tokens=5).wait()) == echo(PROMPT, 5)


def test_an_engine_that_sends_an_invalid_frame_is_replaced(rig: SupervisorRig) -> None:
    error = rig.open(orders="nonsense=1").wait().error
    assert error is not None
    assert "(it sent an invalid frame" in error[1]
    assert tokens(rig.open(max_tokens=2).wait()) == echo(PROMPT, 2)


def test_poison_is_found_among_many_while_the_others_and_new_ones_live(rig: SupervisorRig) -> None:
    others = [rig.open(orders="delay=0.001", max_tokens=200 + k) for k in range(32)]
    wait_for(lambda: all(client.responses for client in others))
    poison = [rig.open(orders=f"delay=0.001,crash={k}", max_tokens=100) for k in (1, 4)]
    for client in poison:
        error = client.wait().error
        assert error is not None
        assert error[0] == "INTERNAL"
    new = rig.open(max_tokens=5)
    for k, client in enumerate(others):
        assert client.wait().error is None
        assert tokens(client) == echo(PROMPT, 200 + k)
    assert tokens(new.wait()) == echo(PROMPT, 5)
    assert rig.stats.deaths <= 18
    assert rig.stats.endings == ["poison"] * 2


def test_deadlines_and_cancellations_hold_while_there_is_no_engine(rig: SupervisorRig) -> None:
    late = rig.open(orders="hold=5", max_tokens=2000, timeout=600.0)
    cancelled = rig.open(orders="hold=5", max_tokens=2000)
    other = rig.open(orders="pause=5", max_tokens=6)
    wait_for(lambda: late.responses and cancelled.responses and other.responses)
    rig.order(start="hang")
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    hanging = wait_for(lambda: rig.supervisor.pid is None and rig.supervisor._engine_process)
    cancelled.cancelled = True
    assert cancelled.wait().error == ("CANCELLED", "Request was cancelled")
    rig.streams._streams[1].deadline = time.monotonic()
    error = late.wait().error
    assert error is not None and error[0] == "CANCELLED"
    assert "deadline exceeded" in error[1]
    rig.control.unlink()
    hanging.kill("the test goes on")
    assert tokens(other.wait()) == echo(PROMPT, 6)


def test_if_no_engine_starts_open_streams_end_with_the_cause(rig: SupervisorRig) -> None:
    clients = [rig.open(orders="hold=5", max_tokens=2000) for _ in range(4)]
    wait_for(lambda: all(client.responses for client in clients))
    rig.order(start="exit")
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for client in clients:
        error = client.wait().error
        assert error is not None and error[0] == "UNAVAILABLE"
        assert "cannot be restarted (2 attempts failed): " in error[1]
        assert "(exit status 7); retry in " in error[1]
    assert not rig.supervisor.can_serve
    rig.control.unlink()
    wait_for(lambda: rig.supervisor.can_serve)
    assert tokens(rig.open(max_tokens=2).wait()) == echo(PROMPT, 2)
