"""The answer to `control` "stats": complete with an engine, prompt and honest without one."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from frontend_rig import RecordingStats

from inflight.engine.deltas import SequenceDelta, StepStats, TokenColumns
from inflight.engine.messages import EngineReady, StepMessage
from inflight.frontend.errors import RequestError
from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.operator.counters import Counters
from inflight.frontend.operator.status import InstanceIdentity, InstanceStatus

READY = EngineReady(
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=[0],
    num_blocks=8,
    block_size=16,
    dtype="float32",
    device="cpu",
    attention_backend="cpu",
    load_seconds=0.1,
)
LOAD = StepStats(**{**dict.fromkeys(StepStats.__struct_fields__, 0), "running": 3, "blocks_free": 8})  # type: ignore[arg-type]


class FakeSupervisor:
    """Answers as it is told: with `value`, with an error, or not at all (`value` None)."""

    def __init__(self) -> None:
        self.value: Any = {"load": {}, "uptime_seconds": 1.0, "pid": 7}
        self.refusal: str | None = None
        self.pid: int | None = 7
        self.asked: list[Future[Any]] = []

    def ask(self, question: object) -> Future[Any]:
        answer: Future[Any] = Future()
        self.asked.append(answer)
        if isinstance(self.value, RequestError):
            answer.set_exception(self.value)
        elif self.value is not None:
            answer.set_result(self.value)
        return answer


class FakeStreams:
    num_open = 2
    num_open_sequences = 5

    def refuse_new(self, make_error: object) -> None: ...
    def end_all(self, error: object) -> None: ...


class Rig:
    def __init__(self) -> None:
        self.supervisor, self.streams, self.counters = FakeSupervisor(), FakeStreams(), Counters(RecordingStats())
        self.drain = Drain(self.streams, 60.0, lambda level, line: None)
        self.status = InstanceStatus(
            InstanceIdentity("m", "1", "m_0_0", "some/checkpoint"),
            READY,
            self.supervisor,
            self.streams,  # type: ignore[arg-type]
            self.drain,
            self.counters,
            lambda: 4,
        )

    def ask(self) -> dict[str, Any]:
        return json.loads(self.status.ask().result(10))


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    rig.status.start()
    yield rig
    rig.drain.stop()
    rig.status.stop()


def test_it_tells_what_the_frontend_and_the_engine_know(rig: Rig) -> None:
    tokens = TokenColumns([2, 3], [0, 0], [7, 8])
    rig.counters.step(StepMessage([SequenceDelta(1, 0, [4, 5])], LOAD, tokens), time.monotonic(), ())
    rig.counters.engine_down()
    rig.counters.engine_ready(READY, True)
    rig.counters.unsuccessful("refused")
    found = rig.ask()
    assert (found["state"], found["reason"]) == ("ready", None)
    assert found["engine"] == rig.supervisor.value
    assert {key: found[key] for key in ("model", "version", "device", "dtype", "num_blocks", "block_size")} == {
        "model": "m",
        "version": "1",
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 8,
        "block_size": 16,
    }
    frontend = found["frontend"]
    assert (frontend["open_requests"], frontend["open_sequences"]) == (2, 5)
    assert (frontend["engine_deaths"], frontend["engine_restarts"], frontend["replays"]) == (1, 1, 4)
    assert frontend["generation_tokens"] == 4
    assert frontend["requests"] == {"refused": 1} and frontend["last_step"]["running"] == 3


def test_a_hung_engine_delays_the_answer_by_less_than_a_second(rig: Rig) -> None:
    rig.supervisor.value = None
    start = time.monotonic()
    found = rig.ask()
    assert time.monotonic() - start >= 0.3, "the engine had its chance"
    assert found["engine"] is None and found["state"] == "unresponsive"
    assert "did not answer within 0.4 s" in found["reason"]
    assert rig.supervisor.asked[0].cancelled(), "the question is withdrawn"


def test_without_an_engine_no_question_is_sent(rig: Rig) -> None:
    rig.supervisor.pid = None
    assert rig.ask()["state"] == "restarting"
    rig.supervisor.refusal = "the engine process cannot be restarted (3 attempts failed): no memory"
    found = rig.ask()
    assert (found["state"], found["reason"]) == ("failed", rig.supervisor.refusal)
    assert not rig.supervisor.asked


def test_an_engine_that_dies_while_it_is_asked_is_said_so(rig: Rig) -> None:
    rig.supervisor.value = RequestError("UNAVAILABLE", "the engine process died")
    found = rig.ask()
    assert found["engine"] is None and found["reason"] == "the engine process died"


def test_it_says_that_the_model_drains(rig: Rig) -> None:
    rig.drain.begin("test")
    assert rig.ask()["state"] == "draining"


def test_simultaneous_status_requests_share_one_question_to_the_engine(rig: Rig) -> None:
    gate = threading.Event()
    rig.supervisor.ask = lambda question: gate.wait(10) and FakeSupervisor.ask(rig.supervisor, question)  # type: ignore[assignment,method-assign,return-value]
    first = rig.status.ask()
    rest = [rig.status.ask() for _ in range(100)]  # while the first is being answered
    gate.set()
    for answer in [first, *rest]:
        assert json.loads(answer.result(10))["state"] == "ready"
    assert len(rig.supervisor.asked) <= 3


def test_a_fault_ends_the_question_and_not_the_thread(rig: Rig) -> None:
    rig.supervisor.value = {"load": object()}
    with pytest.raises(RequestError, match="internal error: no status: TypeError"):
        rig.ask()
    rig.supervisor.value = {"load": {}}
    assert rig.ask()["state"] == "ready"
