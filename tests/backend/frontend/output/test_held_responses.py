"""Responses that wait where sending is costly, and turns of streams that have much to send."""

from __future__ import annotations

import itertools
import time

import pytest
from frontend_rig import RecordingClient
from output_rig import IDS, PROMPT, TEXT, TOKENIZER, Rig, wait_for

from inflight.engine.deltas import SequenceDelta
from inflight.frontend.errors import RequestError
from inflight.frontend.output import inbox


def counts(client: RecordingClient) -> list[int]:
    return [int(response["num_output_tokens"][0]) for response in client.responses]


def test_first_tokens_and_ends_never_wait(paced: Rig) -> None:
    client = paced.open("return_num_output_tokens")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    assert counts(client) == [1]
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    for token in IDS[1:]:
        paced.step(SequenceDelta(1, 0, [token]))
        paced.settle()
    assert counts(client) == [1], "held"
    paced.step(SequenceDelta(1, 0, [], "length"))
    client.wait()
    assert counts(client) == [1, len(IDS) - 1]
    assert client.texts() == [TEXT]


def test_held_output_is_sent_when_due_even_if_no_token_follows(paced: Rig) -> None:
    client = paced.open("return_num_output_tokens")
    for token in IDS[:3]:
        paced.step(SequenceDelta(1, 0, [token]))
        paced.settle()
    wait_for(lambda: sum(counts(client)) == 3)
    assert client.finals == 0


def test_eight_tokens_are_sent_at_once(paced: Rig) -> None:
    client = paced.open("return_num_output_tokens", max_tokens=100)
    tokens = itertools.cycle(IDS)
    paced.step(SequenceDelta(1, 0, [next(tokens)]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    for _ in range(20):
        paced.step(SequenceDelta(1, 0, [next(tokens)]))
        paced.settle()
    assert counts(client) == [1, 8, 8]


def test_what_is_held_is_sent_before_all_streams_are_ended(paced: Rig) -> None:
    client = paced.open("return_token_ids")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    paced.step(SequenceDelta(1, 0, IDS[1:2]))
    paced.settle()
    paced.step(SequenceDelta(1, 0, IDS[2:3]))
    paced.streams.end_all(RequestError("UNAVAILABLE", "draining"))
    assert client.wait().error == ("UNAVAILABLE", "draining")
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS[:3]


def test_an_error_comes_behind_what_is_held(paced: Rig) -> None:
    client = paced.open("return_token_ids")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    paced.step(SequenceDelta(1, 0, IDS[1:3]))
    paced.settle()
    client.cancelled = True
    client.wait()
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS[:3]


@pytest.mark.parametrize("end", ["its last token", "an error"])
def test_a_costly_stream_does_not_hold_the_others(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_TOKENS", 1)
    rig = Rig()
    costly, cheap = rig.open("return_token_ids", max_tokens=100), rig.open()
    rig.settle()
    sequence = rig.streams._streams[1].sequences[0]
    advance_each = sequence.advance_each

    def slow(token_ids: list[int]) -> None:
        time.sleep(0.01)  # more than a slice
        advance_each(token_ids)

    sequence.advance_each = slow  # type: ignore[method-assign]
    order: list[str] = []
    cheap.send = lambda *response, send=cheap.send: (order.append("cheap"), send(*response))  # type: ignore[method-assign]
    for end_costly in ("send", "fail"):
        wrapped = getattr(costly, end_costly)
        setattr(costly, end_costly, lambda *response, wrapped=wrapped: (order.append("costly"), wrapped(*response)))
    rig.feed(4 * IDS, finish="length" if end == "its last token" else None)
    rig.feed(IDS, request_id=2)
    if end == "an error":
        rig.streams._fail_behind(1, RequestError("INTERNAL", "NaN"), "failed")
    assert cheap.wait().texts() == [TEXT]
    costly.wait()
    assert order[-1] == "costly", "the cheap one has ended before"
    sent = [token for response in costly.responses for token in response["token_ids"].tolist()]
    assert sent == 4 * IDS
    assert costly.texts() == [TOKENIZER.decode([*PROMPT, *4 * IDS]).removeprefix(TOKENIZER.decode(PROMPT))]
    assert (costly.error is None) == (end == "its last token")
    rig.streams.stop("test over")


def test_tokens_that_waited_together_are_decoded_once_and_sent_as_if_they_had_not(paced: Rig) -> None:
    client = paced.open("return_token_ids")
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    (sequence,) = paced.streams._streams[1].sequences
    joined: list[list[int]] = []
    advance_each = sequence.advance_each
    sequence.advance_each = lambda ids: (joined.append(ids), advance_each(ids))[1]  # type: ignore[method-assign]
    for token in IDS[1:]:
        paced.step(SequenceDelta(1, 0, [token]))
    paced.step(SequenceDelta(1, 0, [], "length"))
    client.wait()
    assert joined == [IDS[1:]]
    assert client.texts() == [TEXT]
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS
