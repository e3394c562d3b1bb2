"""Streams that cannot be sent as fast as the engine makes tokens: it drops them meanwhile, and they lose nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import echo
from supervisor_rig import PROMPT, SupervisorRig, tokens, wait_for

from inflight.engine.messages import SequenceDelta
from inflight.frontend.backlog import Backlog

LIMIT = 20


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SupervisorRig]:
    rig = SupervisorRig(tmp_path / "control.json").start()
    rig.streams._backlog = Backlog(rig.supervisor, rig.streams._events.put, rig.streams._replay.again, LIMIT)
    yield rig
    rig.stop()


def slow_down(rig: SupervisorRig, seconds: float) -> None:
    """Each token of the only stream takes the sender thread so long."""
    stream = wait_for(lambda: rig.streams._streams.get(1))
    for sequence in stream.sequences:

        def slow(delta: SequenceDelta, advance=sequence.advance) -> None:
            time.sleep(seconds)
            advance(delta)

        sequence.advance = slow


def paused(rig: SupervisorRig) -> bool:
    stream = rig.streams._streams.get(1)
    return stream is not None and stream.paused


def test_nothing_is_submitted_again_before_the_engine_has_said_that_nothing_is_on_its_way() -> None:
    answer: Future[bytes] = Future()
    engine = SimpleNamespace(abort=lambda request_id: None, ask=lambda question: answer)
    submitted: list[str] = []
    backlog = Backlog(engine, lambda call: call(), submitted.append, 2)  # type: ignore[arg-type]
    flags = dict.fromkeys(("paused", "stopped", "closed"), False)
    stream: Any = SimpleNamespace(
        inbox=[1, 2, 3], request_id=1, last_act=None, end_time=None, rest=lambda: "what is left", **flags
    )
    backlog.took(stream)
    stream.inbox.clear()
    backlog.served(stream)
    assert (stream.paused, submitted) == (True, []), "deltas may be on their way"
    stream.inbox.append(4)
    answer.set_result(b"")
    assert submitted == [], "one came"
    stream.inbox.clear()
    backlog.served(stream)
    assert (stream.paused, submitted) == (False, ["what is left"])


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_with_a_backlog_pauses_in_the_engine_and_loses_no_token(rig: SupervisorRig, n: int) -> None:
    resubmitted = []
    submit = rig.supervisor.resubmit
    rig.supervisor.resubmit = lambda requests, *flags, **named: (  # type: ignore[method-assign]
        resubmitted.extend(requests),
        submit(requests, *flags, **named),
    )
    client = rig.open(orders="delay=0.001", n=n, max_tokens=100)
    slow_down(rig, 0.004)
    assert client.wait().error is None
    counts: list[list[int]] = [[] for _ in range(n)]
    for response in client.responses:
        ids = iter(response["token_ids"].tolist())
        for sequence, count in zip(counts, response["token_counts"].tolist()):
            sequence += [next(ids) for _ in range(count)]
    assert counts == [echo(PROMPT, 100)] * n
    assert resubmitted, "it was paused"
    assert rig.supervisor._outbox.in_engine == set()


def test_an_engine_that_dies_while_a_stream_is_paused_costs_no_token(rig: SupervisorRig) -> None:
    client = rig.open(orders="delay=0.001", max_tokens=100)
    slow_down(rig, 0.02)
    wait_for(lambda: paused(rig))
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert tokens(client.wait()) == echo(PROMPT, 100)
    assert client.error is None


def test_a_paused_stream_can_be_cancelled(rig: SupervisorRig) -> None:
    client = rig.open(orders="delay=0.001", max_tokens=100)
    slow_down(rig, 0.004)
    wait_for(lambda: paused(rig))
    client.cancelled = True
    assert client.wait().error == ("CANCELLED", "Request was cancelled")
    sent = tokens(client)
    assert sent == echo(PROMPT, 100)[: len(sent)]
    wait_for(lambda: not rig.supervisor._outbox.in_engine)
