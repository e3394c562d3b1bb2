"""How a stream ends other than by its last token: cancelled, late, refused, failed, unloaded."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
from frontend_rig import RecordingClient, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from output_rig import IDS, PROMPT, TEXT, TOKENIZER, Rig, Slow, wait_for

from inflight.engine.adapter import AdapterRef
from inflight.engine.deltas import RequestFailed, SequenceDelta
from inflight.engine.messages import AddRequest
from inflight.frontend.errors import RequestError
from inflight.frontend.output.request_state import RequestState


def test_a_cancelled_stream_is_aborted_at_once_and_ends_with_cancelled(rig: Rig) -> None:
    client = rig.open()
    rig.feed(IDS[:1], finish=None)
    client.cancelled = True
    client.wait()
    assert client.error == ("CANCELLED", "Request was cancelled")
    assert (1, None) in rig.engine.aborted
    rig.feed(IDS)  # late
    time.sleep(0.05)
    assert client.finals == 1
    while len(rig.lines) < 2:
        time.sleep(0.001)
    assert rig.lines == [
        "Cancelling the request 1 after 1 output tokens: Request was cancelled",
        "Successfully cancelled the request 1",
    ]


def test_the_line_about_a_cancelled_request_has_the_clients_name_for_it(rig: Rig) -> None:
    client = rig.open(name="poem\n7")
    client.cancelled = True
    client.wait()
    rig.open(name="other")
    rig.feed(IDS, request_id=2)
    rig.settle()
    assert rig.lines[0] == "Cancelling the request 1 'poem\\n7' after 0 output tokens: Request was cancelled"


def test_a_request_that_ended_before_its_cancellation_was_seen_is_not_logged(rig: Rig) -> None:
    client = rig.open()
    rig.feed(IDS)
    client.wait()
    stream = RequestState(make_request(PROMPT), client, TOKENIZER, 1)
    stream.closed = True
    rig.streams._cancel(stream, RequestError("CANCELLED", "Request was cancelled"), "cancelled")
    assert rig.lines == []


def test_a_deadline_ends_a_stream_after_its_tokens_so_far_were_sent(rig: Rig) -> None:
    client = rig.open(timeout=600.0)
    rig.feed(IDS[:2], finish=None)
    rig.settle()
    rig.streams._streams[1].deadline = time.monotonic()
    client.wait()
    assert client.error is not None
    code, message = client.error
    assert code == "CANCELLED"
    assert message == "deadline exceeded: the request's timeout of 600 s ran out after 2 output tokens"
    assert client.texts() == [TOKENIZER.decode(IDS[:2])]
    assert (1, None) in rig.engine.aborted


def test_a_deadline_does_not_wait_for_the_next_sweep() -> None:
    rig = Rig(check_seconds=30.0)
    try:
        client = rig.open(timeout=0.05)
        assert client.ended.wait(20)
    finally:
        rig.streams.stop("test over")


def test_the_engines_refusal_ends_its_stream_and_its_death_none(rig: Rig) -> None:
    one, two, three = rig.open(), rig.open(max_tokens=len(IDS)), rig.open()
    rig.streams.on_request_failed(RequestFailed(1, "UNAVAILABLE", "full"))
    rig.step(SequenceDelta(2, 0, [IDS[0]]))
    rig.streams.on_engine_down([2], {}, "signal 9")
    assert one.wait().error == ("UNAVAILABLE", "full")
    rig.settle()
    (again,) = rig.engine.resubmitted
    assert (again.request_id, again.output_token_ids, again.replayed) == (2, [IDS[:1]], True)
    rig.feed(IDS[1:], request_id=2)
    assert two.wait().texts() == [TEXT]
    rig.feed(IDS, request_id=3)
    assert three.wait().texts() == [TEXT]


def test_how_each_request_ended_is_counted_before_its_client_hears_of_it() -> None:
    rig = Rig(max_sequences=9, max_replays=0)
    unsettled: list[int] = []

    class Client(RecordingClient):
        def send(self, outputs: dict[str, Any], final: bool) -> None:
            if final:
                unsettled.append(rig.stats.unsettled)
            super().send(outputs, final)

        def fail(self, code: str, message: str) -> None:
            unsettled.append(rig.stats.unsettled)
            super().fail(code, message)

    def open_one(**options: Any) -> Client:
        client = Client()
        rig.streams.open(make_request(PROMPT, **options), client)
        return client

    done, refused, given_up, died, cancelled = (open_one() for _ in range(5))
    late = open_one(timeout=0.01)
    invalid, beyond, lost = Client(), open_one(n=5), open_one()
    rig.streams.reject(invalid, RequestError("INVALID_ARG", "no"))
    rig.streams.on_request_failed(RequestFailed(2, "UNAVAILABLE", "full"))
    rig.step(failed=[RequestFailed(3, "INTERNAL", "NaN")])
    rig.streams.on_engine_down([4], {}, "signal 9")
    cancelled.cancelled = True
    for client in (refused, given_up, died, cancelled, late, invalid, beyond):
        client.wait()
    rig.feed(IDS)
    done.wait()
    lost.broken = True
    rig.feed(IDS, request_id=7)
    lost.wait()
    rig.streams.stop("test over")
    assert died.error == (
        "INTERNAL",
        "the engine process died while it ran this request (signal 9); it is not replayed again (max_replays=0)",
    )
    counted = ["cancelled", "failed", "invalid", "poison", "refused", "refused", "timeout"]
    assert sorted(rig.stats.endings) == counted
    assert len(rig.stats.streams) == 2, "also the one whose last response was lost, and only once"
    assert len(unsettled) == 10
    assert set(unsettled) == {0}


def test_a_refusal_by_the_supervisor_ends_the_stream(rig: Rig) -> None:
    rig.engine.refuse = RequestError("UNAVAILABLE", "down")
    assert rig.open().wait().error == ("UNAVAILABLE", "down")


def test_requests_beyond_the_capacity_are_refused_until_there_is_room() -> None:
    rig = Rig(max_sequences=3)
    try:
        first = rig.open(n=2)
        refused = rig.open(n=2).wait()
        assert refused.error is not None
        assert refused.error[0] == "UNAVAILABLE"
        assert "2 sequences are open and 3 are allowed" in refused.error[1]
        third = rig.open(n=1)
        rig.step(SequenceDelta(1, 0, [5], "length"), SequenceDelta(1, 1, [5], "length"))
        first.wait()
        wait_for(lambda: rig.streams.num_open_sequences == 1)
        rig.open(n=2)
        rig.feed(IDS, request_id=2)
        third.wait()
        assert third.error is None
    finally:
        rig.streams.stop("test over")


def test_a_request_that_can_never_be_opened_is_invalid() -> None:
    rig = Rig(max_sequences=3)
    try:
        assert rig.open(n=4).wait().error == (
            "INVALID_ARG",
            "n=4 is more than the 3 sequences that may be open at once",
        )
    finally:
        rig.streams.stop("test over")


def test_a_stream_whose_creation_fails_takes_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_sequences=1)
    with monkeypatch.context() as broken:
        broken.setattr("inflight.frontend.output.output_processor.RequestState", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                rig.open()
    client = rig.open()
    rig.feed(IDS, request_id=4)
    assert client.wait().error is None
    rig.streams.stop("over")


def test_a_request_that_the_engine_fails_ends_with_the_error_after_its_tokens(rig: Rig) -> None:
    given_up, other = rig.open("return_token_ids"), rig.open()
    failed = [RequestFailed(1, "UNAVAILABLE", "the adapter was not loaded in time; try again later")]
    rig.step(SequenceDelta(1, 0, IDS[:1]), SequenceDelta(2, 0, IDS[:1]), failed=failed)
    assert given_up.wait().error == ("UNAVAILABLE", "the adapter was not loaded in time; try again later")
    assert [response["token_ids"].tolist() for response in given_up.responses] == [IDS[:1]]
    assert (1, None) in rig.engine.aborted
    rig.feed(IDS[1:], request_id=2)
    assert other.wait().texts() == [TEXT]


def test_stop_fails_what_is_open() -> None:
    rig = Rig()
    client = rig.open()
    rig.streams.stop("the model is being unloaded")
    assert client.error == ("UNAVAILABLE", "the model is being unloaded")
    assert client.finals == 1


moves = st.lists(
    st.tuples(st.sampled_from(["token", "finish", "cancel", "down", "fail", "late"]), st.integers(1, 5)), max_size=40
)


@settings(max_examples=25, deadline=None)
@given(moves=moves, stream=st.booleans(), stop=st.booleans(), paced=st.booleans())
def test_every_stream_ends_exactly_once(moves: list[tuple[str, int]], stream: bool, stop: bool, paced: bool) -> None:
    """Invariants 4 and 6 under random events; `Client` fails on anything after FINAL."""
    rig = Rig(check_seconds=0.001, pacing=Slow() if paced else None)
    try:
        clients = {k: rig.open(stream=stream, stop=["st of"] if stop else []) for k in range(1, 6)}
        fed: dict[int, list[int]] = {k: [] for k in clients}
        for move, k in moves:
            token = IDS[len(fed[k]) % len(IDS)]
            if move in ("token", "finish"):
                fed[k].append(token)
                rig.step(SequenceDelta(k, 0, [token], "length" if move == "finish" else None))
            elif move == "cancel":
                clients[k].cancelled = True
            elif move == "down":
                rig.streams.on_engine_down([k], {}, "signal 9")
            elif move == "fail":
                rig.streams.on_request_failed(RequestFailed(k, "INTERNAL", "failed"))
            else:
                rig.step(SequenceDelta(99, 0, [token]))
    finally:
        rig.streams.stop("over")
    for k, client in clients.items():
        assert client.finals == 1
        shown = "".join(client.texts()).removeprefix("" if stream else "Return")
        assert TOKENIZER.decode(fed[k]).startswith(shown)
    assert rig.streams.num_open_sequences == 0
    assert not rig.errors


def test_a_request_that_cannot_be_sent_to_the_engine_is_answered_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: AddRequest) -> None:
        raise OverflowError("integers of 65 bits")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit", broken)
        client = rig.open()
        assert client.wait().error == ("INTERNAL", "internal error: OverflowError: integers of 65 bits")
    other = rig.open()
    rig.step(SequenceDelta(2, 0, IDS, "length"))
    assert other.wait().error is None
    wait_for(lambda: not rig.streams.num_open)
    assert client.finals == 1


@pytest.mark.parametrize("ending", ["finished", "cancelled", "late", "failed", "refused", "unloaded"])
def test_a_request_lets_go_of_its_adapter_when_it_ends(rig: Rig, ending: str) -> None:
    """Its files leave with the last reference, so none may wait for the collection of a cycle."""

    class Adapter:
        ref = AdapterRef("doll", "0" * 32, "/nowhere", 8)

    adapter: Any = Adapter()
    gone = weakref.ref(adapter)
    request = make_request(PROMPT, timeout=0.001 if ending == "late" else None)
    request.adapter = adapter
    client = RecordingClient(cancelled=ending == "cancelled")
    rig.engine.refuse = RequestError("UNAVAILABLE", "no") if ending == "refused" else None
    gc.collect()
    gc.disable()
    try:
        rig.streams.open(request, client)
        del request, adapter
        if ending == "finished":
            rig.feed(IDS)
        elif ending == "failed":
            rig.streams.on_request_failed(RequestFailed(1, "UNAVAILABLE", "no"))
        elif ending == "unloaded":
            rig.streams.end_all(RequestError("UNAVAILABLE", "unloaded"))
        client.wait()
        rig.settle()
        rig.engine.submitted.clear()
        rig.engine.refuse = None
        wait_for(lambda: rig.settle() or rig.stats.streams or rig.stats.endings)
        rig.stats.streams.clear()
        wait_for(lambda: gone() is None)
    finally:
        gc.enable()
