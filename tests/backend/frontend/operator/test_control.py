"""Requests that ask the engine about itself: from the parameter `control` to the one response."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer

from inflight.engine.messages import Answer, Ask, DumpTrace, GetStats, decode_to_engine, decode_to_frontend, encode
from inflight.frontend.errors import RequestError
from inflight.frontend.operator.control import Control, control_of, relay
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.request.contract import WireRequest


class Rig:
    """Streams without an engine: the test resolves the answers itself."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.streams = OutputProcessor(demo_tokenizer(), None, RecordingStats(), self.errors.append)  # type: ignore[arg-type]
        self.streams.start()

    def ask(self, **options: Any) -> tuple[RecordingClient, Future[Any]]:
        client, answer = RecordingClient(**options), Future()
        relay(answer, self.streams, client)
        return client, answer


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.streams.stop("over")


def test_the_parameter_names_the_question():
    asked: list[Any] = []
    control = Control(lambda question: asked.append(question) or Future(), SimpleNamespace(ask=Future), None)  # type: ignore[arg-type]
    assert control.answer(WireRequest({})) is None
    assert control.answer(WireRequest({}, {"max_tokens": 3})) is None
    assert control.answer(WireRequest({}, {"control": "step_trace"})) is not None
    assert asked == [DumpTrace()]
    assert control.answer(WireRequest({}, {"control": "stats"})) is not None and len(asked) == 1
    for value in ("trace", ""):
        with pytest.raises(RequestError, match='must be "step_trace" or "stats" or "drain"'):
            control.answer(WireRequest({}, {"control": value}))
    for value in (1, True, ["step_trace"]):
        with pytest.raises(RequestError, match="must be a string"):
            control_of(WireRequest({}, {"control": value}))


def test_the_messages_survive_the_pipe():
    for question in (DumpTrace(), GetStats()):
        assert decode_to_engine(encode(Ask(7, question))) == Ask(7, question)
    for answer in (Answer(7, b"{}"), Answer(8, {"steps": [1, 2.5, None]}), Answer(9, error=("INTERNAL", "no"))):
        assert decode_to_frontend(encode(answer)) == answer


def test_the_answer_is_one_final_response(rig):
    client, answer = rig.ask()
    answer.set_result(b'{"steps": []}')
    client.wait()
    assert [response["text_output"].tolist() for response in client.responses] == [[b'{"steps": []}']]


def test_each_client_gets_its_own_answer(rig):
    asked = [rig.ask() for _ in range(3)]
    for number, (_, answer) in reversed(list(enumerate(asked))):
        answer.set_result(str(number).encode())
    assert [client.wait().responses[0]["text_output"][0] for client, _ in asked] == [b"0", b"1", b"2"]


def test_an_error_reaches_the_client_with_its_code(rig):
    for error in (("INVALID_ARG", "step_trace is off"), ("UNAVAILABLE", "the engine process died")):
        client, answer = rig.ask()
        answer.set_exception(RequestError(*error))
        assert client.wait().error == error
    assert not rig.errors


def test_a_client_that_blocks_does_not_block_the_thread_with_the_answer(rig):
    import threading

    gate = threading.Event()
    client, answer = rig.ask()
    send, client.send = client.send, lambda *args: (gate.wait(10), send(*args))
    answer.set_result(b"{}")  # returns although nothing can be sent
    assert not client.responses
    gate.set()
    assert client.wait().error is None


def test_an_unreachable_client_is_logged_and_affects_no_other(rig):
    (gone, first), (other, second) = rig.ask(broken=True), rig.ask()
    first.set_result(b"{}")
    second.set_result(b"{}")
    assert other.wait().error is None
    assert "cannot send an answer" in rig.errors[0]
    assert gone.wait().error == ("INTERNAL", "internal error: the answer cannot be sent: cannot reach the client")
