"""A suspect runs alone in an engine that was emptied for it: the supervisor, the streams and a fake engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import echo
from frontend_rig import RecordingClient
from supervisor_rig import PROMPT, SupervisorRig, tokens, wait_for

from inflight.engine.deltas import SequenceDelta
from inflight.engine.messages import AbortRequest, AddRequest, Ask, decode_to_engine
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.engine_client.risk_wait import RiskWait
from inflight.frontend.engine_client.send_buffer import SendBuffer
from inflight.frontend.lifecycle.drain import Drain

LENGTH = 400


class Trials:
    """Records what the frontend did, and can hold the engine's confirmation that it is empty.

    Attributes:
        recalled: what the engine was emptied of, each time.
        tried: the suspects.
        sent: all requests that were sent again.
        held: confirmations that wait, once `hold` is set.
    """

    def __init__(self, rig: SupervisorRig) -> None:
        self.recalled: list[set[int]] = []
        self.tried: list[list[int]] = []
        self.sent: list[int] = []
        self.held: list[Callable[[], None]] = []
        self.hold = False
        self._order = rig.order
        self._recall, self._resubmit = rig.supervisor.recall, rig.supervisor.resubmit
        rig.supervisor.recall, rig.supervisor.resubmit = self.recall, self.resubmit  # type: ignore[method-assign]

    def recall(self, emptied: Callable[[], None]) -> set[int]:
        found = self._recall(lambda: self.held.append(emptied) if self.hold else emptied())
        self.recalled.append(found)
        return found

    def resubmit(self, requests: Any, hold_new: bool = False, settled: bool = True) -> None:
        requests = list(requests)
        self.sent += [request.request_id for request in requests]
        if hold_new and requests:
            self.tried.append([request.request_id for request in requests])
        self._resubmit(requests, hold_new, settled)

    def release(self) -> None:
        self.hold = False
        self._order(go="")
        self.held.pop()()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SupervisorRig]:
    rig = SupervisorRig(tmp_path / "control.json").start()
    yield rig
    rig.stop()


def start(rig: SupervisorRig, hold: bool = False, crash: str = "crash=4") -> tuple[Trials, list[RecordingClient]]:
    """Four streams, two of them with n=2, and then a poison, the last client."""
    trials = Trials(rig)
    trials.hold = hold
    may_be_noticed_late = hold or crash.startswith("stop")  # by then, none may have ended
    pace = "follow=8" if may_be_noticed_late else "delay=0.001"
    clients = [rig.open(orders=pace, n=1 + k % 2, max_tokens=LENGTH) for k in range(4)]
    wait_for(lambda: all(client.responses for client in clients))
    return trials, [*clients, rig.open(orders=f"delay=0.001,{crash}", max_tokens=LENGTH)]


def check(client: RecordingClient, n: int = 1) -> None:
    """It got each token once."""
    assert client.wait().error is None
    sequences: list[list[int]] = [[] for _ in range(n)]
    for response in client.responses:
        ids = iter(response["token_ids"].tolist())
        for sequence, count in zip(sequences, response["token_counts"].tolist()):
            sequence += [next(ids) for _ in range(count)]
    assert sequences == [echo(PROMPT, LENGTH)] * n


def check_all(clients: list[RecordingClient]) -> None:
    for k, client in enumerate(clients):
        check(client, 1 + k % 2)


def kill(rig: SupervisorRig) -> None:
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.supervisor.pid not in (None, pid))


def test_the_others_have_had_tokens_from_the_engine_that_the_suspect_kills(rig: SupervisorRig) -> None:
    trials, (*others, poison) = start(rig, hold=True)
    wait_for(lambda: trials.held)
    assert rig.stats.deaths == 3
    assert trials.recalled == [{1, 2, 3, 4}]
    assert not rig.supervisor._send_buffer.in_engine, "it is empty"
    new = rig.open(max_tokens=3)
    wait_for(lambda: rig.supervisor._send_buffer.num_new)
    assert not trials.tried
    assert not poison.ended.is_set()
    trials.release()
    error = poison.wait().error
    assert error is not None and "4 times in a row" in error[1]
    assert trials.tried == [[5]]
    check_all(others)
    assert tokens(new.wait()) == echo(PROMPT, 3)
    assert (rig.stats.deaths, rig.stats.endings) == (4, ["poison"])
    wait_for(lambda: not rig.supervisor._send_buffer.in_engine)


def test_a_suspect_that_survives_goes_on_and_so_do_the_others(rig: SupervisorRig) -> None:
    trials, clients = start(rig, hold=True)
    wait_for(lambda: trials.held)
    stream = rig.streams._streams[5]
    rest = stream.rest
    stream.rest = lambda: cured(rest())  # type: ignore[method-assign]
    trials.release()
    check_all(clients)
    assert rig.stats.deaths == 3
    assert rig.stats.endings == []


def cured(request: AddRequest | None) -> AddRequest:
    """Without its fault."""
    assert request is not None
    return msgspec.structs.replace(request, tenant="delay=0.001")


@pytest.mark.parametrize("who", [0, -1])
def test_a_stream_that_is_cancelled_while_the_engine_is_emptied(rig: SupervisorRig, who: int) -> None:
    trials, clients = start(rig, hold=True)
    wait_for(lambda: trials.held)
    gone = clients.pop(who)
    gone.cancelled = True
    assert gone.wait().error == ("CANCELLED", "Request was cancelled")
    trials.release()
    if who == 0:
        assert "while it ran this request" in clients.pop().wait().error[1]  # type: ignore[index]
        assert trials.tried == [[5]]
        clients.insert(0, clients[1])
    else:
        assert not trials.tried
    check_all(clients)


def test_a_suspect_that_is_cancelled_during_its_trial(rig: SupervisorRig) -> None:
    trials, (*others, suspect) = start(rig, crash="stop=4")
    for _ in range(3):  # it stops each engine instead of killing it
        wait_for(rig.is_stopped)
        kill(rig)
    wait_for(rig.is_stopped)
    assert trials.tried == [[5]]
    suspect.cancelled = True
    assert suspect.wait().error == ("CANCELLED", "Request was cancelled")
    go_on(rig)
    check_all(others)
    assert rig.stats.deaths == 3


def go_on(rig: SupervisorRig) -> None:
    pid = rig.supervisor.pid
    assert pid is not None
    rig.order(go="")
    os.kill(pid, signal.SIGCONT)


def test_a_kill_while_the_engine_is_emptied_fails_nobody_and_the_trial_follows(rig: SupervisorRig) -> None:
    trials, (*others, poison) = start(rig, hold=True)
    wait_for(lambda: trials.held)
    kill(rig)
    wait_for(lambda: len(trials.held) == 2 and rig.stats.deaths == 4)
    trials.held.pop(0)()  # of the first engine: too late
    assert not trials.tried
    trials.release()
    assert "while it ran this request" in poison.wait().error[1]  # type: ignore[index]
    check_all(others)
    assert rig.stats.endings == ["poison"]


def test_two_poisons_are_tried_in_turn_and_one_that_comes_back_is_found_again(rig: SupervisorRig) -> None:
    trials, (*others, first) = start(rig)
    second = rig.open(orders="delay=0.001,crash=6", max_tokens=LENGTH)
    for client in (first, second):
        assert "while it ran this request" in client.wait().error[1]  # type: ignore[index]
    back = rig.open(orders="delay=0.001,crash=2", max_tokens=LENGTH)
    assert "while it ran this request" in back.wait().error[1]  # type: ignore[index]
    check_all(others)
    assert rig.stats.endings == ["poison"] * 3
    assert {5, 6, 7} >= {tried for (tried,) in trials.tried}


def test_a_stop_during_a_trial_ends_every_stream(rig: SupervisorRig) -> None:
    trials, clients = start(rig, hold=True)
    wait_for(lambda: trials.held)
    new = rig.open(max_tokens=3)
    rig.supervisor.stop()
    rig.streams.stop("unloaded")
    assert [client.wait().error for client in [*clients, new]] == [("UNAVAILABLE", "unloaded")] * 6
    assert rig.streams.num_open == 0


def drain(rig: SupervisorRig, timeout: float) -> Future[dict[str, Any]]:
    return Drain(rig.streams, timeout, lambda level, line: None).begin("test")


def test_a_drain_lets_a_trial_and_what_waits_for_it_finish(rig: SupervisorRig) -> None:
    trials, (*others, poison) = start(rig, hold=True)
    wait_for(lambda: trials.held)
    new = rig.open(max_tokens=3)
    drained = drain(rig, 600)
    error = rig.open(max_tokens=3).wait().error
    assert error is not None and "the model is draining" in error[1]
    trials.release()
    assert "while it ran this request" in poison.wait().error[1]  # type: ignore[index]
    check_all(others)
    assert tokens(new.wait()) == echo(PROMPT, 3)
    assert (drained.result()["finished"], drained.result()["ended"]) == (6, 0)


def test_a_drain_that_is_over_while_the_engine_is_emptied_ends_all_and_sends_nothing_again(rig: SupervisorRig) -> None:
    trials, clients = start(rig, hold=True)
    wait_for(lambda: trials.held)
    clients.append(rig.open(max_tokens=3))
    trials.sent.clear()
    drained = drain(rig, 0)
    errors = [client.wait().error for client in clients]
    assert {code for code, _ in errors} == {"UNAVAILABLE"}  # type: ignore[misc]
    assert all("drain_timeout=0 s" in text for _, text in errors)  # type: ignore[misc]
    assert (drained.result()["finished"], drained.result()["ended"]) == (0, 6)
    trials.release()
    rig.supervisor.stop()
    assert not trials.sent
    assert not rig.supervisor._send_buffer.in_engine


@pytest.mark.parametrize("who", ["suspect", "others"])
def test_a_drain_that_is_over_during_a_trial_ends_all_and_sends_nothing_again(rig: SupervisorRig, who: str) -> None:
    """Whichever of them the streams have first."""
    trials, clients = start(rig, crash="stop=4")
    for _ in range(3):
        wait_for(rig.is_stopped)
        kill(rig)
    wait_for(rig.is_stopped)
    assert trials.tried == [[5]]
    if who == "suspect":
        streams = rig.streams._streams
        rig.streams.run(lambda: [streams.update({k: streams.pop(k)}) for k in (1, 2, 3, 4)])
    trials.sent.clear()
    drained = drain(rig, 0)
    assert {client.wait().error[0] for client in clients} == {"UNAVAILABLE"}  # type: ignore[index]
    assert drained.result()["ended"] == 5
    assert not trials.sent
    go_on(rig)


def test_streams_that_all_end_while_the_engine_is_emptied_hold_nothing_up(rig: SupervisorRig) -> None:
    trials, clients = start(rig, hold=True)
    wait_for(lambda: trials.held)
    for client in clients:
        client.cancelled = True
    for client in clients:
        client.wait()
    assert tokens(rig.open(max_tokens=3).wait()) == echo(PROMPT, 3)


def test_recalled_requests_belong_to_the_engine_until_it_has_confirmed() -> None:
    buffer = SendBuffer()
    buffer.resubmit([AddRequest(k, [1], SamplingParams()) for k in (1, 2)], hold_new=False)
    assert buffer.next_request() is not None
    assert buffer.recall() == {1, 2}
    assert (buffer.in_engine, buffer.recalled, buffer.holds_new) == (set(), {1}, True)
    assert buffer.next_request() is None
    assert buffer.next_abort() is not None
    assert buffer.engine_down() == {1}


def test_a_question_does_not_overtake_an_abort(tmp_path: Path) -> None:
    """Its answer says that the engine has dropped the request."""
    supervisor = SupervisorRig(tmp_path / "control.json").supervisor
    for k in (1, 2):
        supervisor._send_buffer.add(AddRequest(k, [1], SamplingParams()))
    assert supervisor._next_frame() is not None
    supervisor.recall(lambda: None)
    supervisor.resubmit([AddRequest(3, [1], SamplingParams())])
    frames = [decode_to_engine(frame) for frame in iter(supervisor._next_frame, None)]
    assert [type(frame) for frame in frames] == [AbortRequest, Ask, AddRequest, AddRequest]
    assert [frame.request_id for frame in frames if isinstance(frame, AddRequest)] == [3, 2]


def test_a_stream_that_was_paused_when_the_engine_was_emptied_returns_once(rig: SupervisorRig) -> None:
    trials, (*others, poison) = start(rig, hold=True)
    wait_for(lambda: trials.held)
    again = [rig.streams._streams[k] for k in (1, 2)]
    for stream in again:  # as backpressure does it, in the sender thread
        rig.streams.run(lambda stream=stream: rig.streams._replay.again(stream.rest()))
    trials.release()
    assert "while it ran this request" in poison.wait().error[1]  # type: ignore[index]
    assert trials.tried == [[5]]
    check_all(others)


def test_suspects_wait_for_four_tokens_of_each_stream_or_as_long_as_the_engine_took_to_start() -> None:
    now, timers, done = [0.0], [], []  # type: ignore[var-annotated]
    wait = RiskWait(lambda seconds, action: timers.append((seconds, action)), lambda: now[0])

    def over() -> bool:
        return wait.is_over(lambda: {1, 2}, lambda: done.append(1))

    wait.engine_down()
    assert not over()
    assert not timers, "no engine is up"
    now[0] = 7.0
    wait.engine_ready(lambda: done.append(1))
    assert [seconds for seconds, _ in timers] == [7.0]
    wait.got_tokens(SequenceDelta(1, 0, [5, 5]))
    wait.got_tokens(SequenceDelta(1, 1, [5, 5]))
    wait.ended(2)
    assert not over()
    wait.got_tokens(SequenceDelta(1, 1, [5, 5]))
    assert over()
    wait.restart()
    assert not over()
    timers.pop()[1]()
    assert over()
    assert done == [1]
