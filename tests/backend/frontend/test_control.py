"""Requests that ask for the step trace: from the parameter to the one response."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from frontend_rig import Client, Stats, demo_tokenizer

from inflight.engine.messages import DumpTrace, RequestFailed, TraceDump, decode_to_engine, decode_to_frontend, encode
from inflight.frontend.contract import WireRequest
from inflight.frontend.control import asks_for_trace
from inflight.frontend.errors import RequestError
from inflight.frontend.streams import Streams


class Engine:
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.released: list[int] = []
        self.aborted: list[int] = []
        self.refuse: RequestError | None = None

    def dump_trace(self, request_id: int) -> None:
        if self.refuse:
            raise self.refuse
        self.asked.append(request_id)

    def release(self, request_id: int) -> None:
        self.released.append(request_id)

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.aborted.append(request_id)


class Rig:
    def __init__(self) -> None:
        self.engine = Engine()
        self.errors: list[str] = []
        self.streams = Streams(demo_tokenizer(), self.engine, Stats(), self.errors.append)  # type: ignore[arg-type]
        self.streams.start()

    def ask(self) -> Client:
        client = Client()
        self.streams.dump_trace(client)
        return client


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.streams.stop("over")


def test_the_parameter_says_what_is_wanted():
    assert not asks_for_trace(WireRequest({}))
    assert not asks_for_trace(WireRequest({}, {"max_tokens": 3}))
    assert asks_for_trace(WireRequest({}, {"control": "step_trace"}))
    for value in ("trace", "", 1, True):
        with pytest.raises(RequestError, match='allowed is "step_trace"'):
            asks_for_trace(WireRequest({}, {"control": value}))


def test_the_messages_survive_the_pipe():
    assert decode_to_engine(encode(DumpTrace(7))) == DumpTrace(7)
    assert decode_to_frontend(encode(TraceDump(7, b"{}"))) == TraceDump(7, b"{}")


def test_the_answer_is_one_final_response(rig):
    client = rig.ask()
    rig.streams.on_trace(TraceDump(rig.engine.asked[0], b'{"steps": []}'))
    client.wait()
    assert [response["text_output"].tolist() for response in client.responses] == [[b'{"steps": []}']]
    assert rig.engine.released == rig.engine.asked
    assert not rig.engine.aborted


def test_each_asker_gets_its_own_answer_once(rig):
    first, second = rig.ask(), rig.ask()
    for request_id in reversed(rig.engine.asked):
        rig.streams.on_trace(TraceDump(request_id, str(request_id).encode()))
        rig.streams.on_trace(TraceDump(request_id, b"again"))
    assert [c.wait().responses[0]["text_output"][0] for c in (first, second)] == [
        str(request_id).encode() for request_id in rig.engine.asked
    ]


def test_the_engines_refusal_its_death_and_an_unload_reach_the_asker(rig):
    client = rig.ask()
    rig.streams.on_request_failed(RequestFailed(rig.engine.asked[-1], "INVALID_ARG", "step_trace is off"))
    assert client.wait().error == ("INVALID_ARG", "step_trace is off")
    client = rig.ask()
    rig.streams.on_engine_down([rig.engine.asked[-1]], "it died")
    assert client.wait().error == ("UNAVAILABLE", "it died")
    rig.engine.refuse = RequestError("UNAVAILABLE", "no engine")
    assert rig.ask().wait().error == ("UNAVAILABLE", "no engine")
    rig.engine.refuse = None
    client = rig.ask()
    rig.streams.stop("over")
    assert client.wait().error == ("UNAVAILABLE", "over")
    assert not rig.errors


def test_an_asker_that_is_gone_is_logged_and_disturbs_nobody(rig):
    gone = Client(broken=True)
    rig.streams.dump_trace(gone)
    other = rig.ask()
    for request_id in rig.engine.asked:
        rig.streams.on_trace(TraceDump(request_id, b"{}"))
    assert other.wait().error is None
    assert "step trace" in rig.errors[0]
    assert gone.wait().error == ("INTERNAL", "the step trace cannot be sent: cannot reach the client")
