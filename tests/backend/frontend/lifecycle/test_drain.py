"""Draining: new requests are refused with a hint, open ones finish or end with a clear error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer, make_request

from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats
from inflight.engine.messages import AddRequest, StepMessage
from inflight.frontend.errors import RequestError, error_of, with_hint
from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.operator.control import Control
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.request.contract import WireRequest

TOKENIZER = demo_tokenizer()
PROMPT = TOKENIZER.encode("the list of names")
HINT = re.compile(r"; retry in ([0-9]+(?:\.[0-9]+)?) s$")


class Engine:
    """Accepts requests; the test decides how they end."""

    def __init__(self) -> None:
        self.submitted: list[AddRequest] = []
        self.aborted: list[int] = []

    def submit(self, request: AddRequest) -> None:
        self.submitted.append(request)

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.aborted.append(request_id)

    def release(self, request_id: int) -> None:
        pass


class Rig:
    def __init__(self, timeout: float) -> None:
        self.lines: list[str] = []
        self.engine = Engine()
        self.stats = RecordingStats()
        self.streams = OutputProcessor(TOKENIZER, self.engine, self.stats, self.lines.append)
        self.streams.start()
        self.drain = Drain(self.streams, timeout, lambda level, line: self.lines.append(line))

    def open(self, **params: Any) -> RecordingClient:
        client = RecordingClient()
        self.streams.open(make_request(PROMPT, max_tokens=9, **params), client)
        return client

    def finish(self, request_id: int, n: int = 1) -> None:
        stats = StepStats(**dict.fromkeys(StepStats.__struct_fields__, 0))
        self.streams.on_step(StepMessage([SequenceDelta(request_id, k, [5], "length") for k in range(n)], stats))


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.drain.stop()
        rig.streams.stop("over")


def make(rigs: list[Rig], timeout: float) -> Rig:
    rigs.append(Rig(timeout))
    return rigs[-1]


def test_open_requests_finish_and_new_ones_are_refused_with_a_hint(rigs: list[Rig]) -> None:
    rig = make(rigs, 60.0)
    clients = [rig.open(), rig.open(n=3)]
    assert not rig.drain.draining
    done = rig.drain.begin("test")
    assert rig.drain.draining and not rig.drain.drained
    code, message = rig.open().wait().error or ("", "")
    found = HINT.search(message)
    assert code == "UNAVAILABLE" and "is draining: it takes no new requests" in message
    assert found is not None and 50 < float(found[1]) <= 60
    assert len(rig.engine.submitted) == 2, "a refused request never reaches the engine"
    rig.finish(1)
    rig.finish(2, n=3)
    result = done.result(10)
    assert (result["finished"], result["ended"]) == (2, 0)
    assert all(client.wait().error is None for client in clients)
    assert rig.drain.drained and rig.open().wait().error is not None


def test_what_does_not_finish_ends_with_a_clear_error(rigs: list[Rig]) -> None:
    rig = make(rigs, 0.0)
    slow, other = rig.open(), rig.open()
    result = rig.drain.begin("test").result(10)
    assert (result["finished"], result["ended"]) == (0, 2)
    for client in (slow, other):
        code, message = client.wait().error or ("", "")
        assert code == "UNAVAILABLE" and "drain_timeout=0 s" in message and HINT.search(message)
    assert sorted(rig.engine.aborted) == [1, 2], "the engine must not go on with them"
    assert rig.stats.endings == ["failed"] * 2


def test_an_idle_model_is_drained_at_once_and_a_second_drain_is_the_first(rigs: list[Rig]) -> None:
    rig = make(rigs, 60.0)
    first = rig.drain.begin("one")
    assert rig.drain.begin("two") is first
    assert first.result(10)["finished"] == 0
    assert sum("draining (" in line for line in rig.lines) == 1


def test_the_control_request_answers_when_nothing_is_open(rigs: list[Rig]) -> None:
    rig = make(rigs, 60.0)
    rig.open()
    told: list[str] = []
    control = Control(Future, SimpleNamespace(ask=Future), rig.drain, lambda: told.append("drain"))  # type: ignore[arg-type]
    answer = control.answer(WireRequest({}, {"control": "drain"}))
    assert answer is not None and not answer.done() and rig.drain.draining and told == ["drain"]
    rig.finish(1)
    assert json.loads(answer.result(10))["finished"] == 1


def test_the_hint_is_the_end_of_the_message_and_never_zero() -> None:
    cases = {0.0: "0.1", 0.02: "0.1", 0.31: "0.4", 2.5: "2.5", 9.96: "10.0", 10.0: "10", 11.2: "12", 3600: "3600"}
    for seconds, text in cases.items():
        message = with_hint("no room", seconds)
        assert message == f"no room; retry in {text} s"
        assert HINT.search(message)
    error = error_of(RequestFailed(3, "UNAVAILABLE", "full", 1.5))
    assert (error.message, error.retry_after) == ("full; retry in 1.5 s", 1.5)
    assert error_of(RequestFailed(3, "UNAVAILABLE", "full")).message == "full"
    assert RequestError("UNAVAILABLE", "full").retry_after is None
