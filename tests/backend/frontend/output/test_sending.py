"""Responses are made in a row and sent in a row; a client that is lost, or a failure beside it, stops no other."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from frontend_rig import make_request, step_message
from output_rig import IDS, PROMPT, STATS, TEXT, Postman, Rig, postmen, wait_for

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs
from inflight.frontend.errors import RequestError
from inflight.frontend.output import inbox, output_processor


def test_metrics_that_cannot_be_published_hold_up_no_answer(rig: Rig) -> None:
    rig.stats.settle = lambda: 1 / 0  # type: ignore[method-assign]
    client = rig.open()
    rig.feed(IDS)
    assert client.wait().texts() == [TEXT]
    assert any("cannot publish metrics" in line for line in rig.errors)


def test_an_unreachable_client_affects_no_other_stream(rig: Rig) -> None:
    broken, fine = rig.open(), rig.open()
    broken.broken = True
    rig.step(SequenceDelta(1, 0, [IDS[0]]), SequenceDelta(2, 0, [IDS[0]]))
    rig.feed(IDS[1:], request_id=2)
    assert fine.wait().texts() == [TEXT]
    assert broken.wait().error is not None
    assert (1, None) in rig.engine.aborted
    assert rig.errors


class Panic(BaseException):
    """Like a Rust panic in the tokenizers library, not an `Exception`."""


def test_a_tokenizer_panic_affects_no_other_stream(rig: Rig) -> None:
    broken, fine = rig.open(), rig.open()
    rig.step(SequenceDelta(1, 0, IDS[:1]), SequenceDelta(2, 0, IDS[:1]))
    assert fine.arrived.wait(10)

    def panic(*_: Any) -> None:
        raise Panic("index out of bounds")

    rig.streams._streams[1].sequences[0].advance = panic  # type: ignore[method-assign]
    rig.feed(IDS[1:], request_id=1)
    assert broken.wait().error == ("INTERNAL", "Panic: index out of bounds")
    rig.feed(IDS[1:], request_id=2)
    assert fine.wait().texts() == [TEXT]


def test_statistics_that_raise_do_not_stop_the_streams(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.open()

    def broken(*_: Any) -> None:
        raise KeyError("a metric")

    monkeypatch.setattr(rig.stats, "step", broken)
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    assert client.wait().error is None
    assert client.texts() == [TEXT]
    assert rig.errors == ["in the sender thread: KeyError: 'a metric'"]


def test_responses_of_a_step_are_made_in_a_row_and_sent_in_a_row(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_processor, "_TURNS_SECONDS", 60.0)
    _, log = postmen(rig, 20)
    rig.step(*[SequenceDelta(number, 0, IDS[:1]) for number in range(1, 21)])
    rig.settle()
    rows = [name for name, _ in itertools.groupby(kind for kind, _ in log)]
    assert rows == ["made", "sent", "made", "sent"], "16 and 4"
    assert [number for kind, number in log if kind == "sent"] == list(range(1, 21))


def test_a_lost_client_among_others_ends_its_stream_alone(rig: Rig) -> None:
    clients, log = postmen(rig, 3)
    clients[1].lost = True
    rig.step(*[SequenceDelta(number, 0, IDS[:1]) for number in (1, 2, 3)])
    rig.settle()
    assert log.count(("sent", 2)) == 1 and log.count(("failed", 2)) == 1
    assert rig.engine.aborted == [(2, None)]
    for number in (1, 3):
        rig.step(*[SequenceDelta(number, 0, [token]) for token in IDS[1:-1]])
        rig.step(SequenceDelta(number, 0, IDS[-1:], "length"))
    assert [client.wait().error is None for client in clients] == [True, False, True]
    assert clients[0].texts() == clients[2].texts() == [TEXT]
    wait_for(lambda: not rig.streams.num_open)


def test_what_was_made_is_sent_before_the_error_that_follows(rig: Rig) -> None:
    (client,), log = postmen(rig, 1)
    rig.step(SequenceDelta(1, 0, IDS[:1]))
    rig.streams._fail_behind(1, RequestError("INTERNAL", "NaN"), "failed")
    assert client.wait().error == ("INTERNAL", "NaN")
    assert log == [("made", 1), ("sent", 1), ("failed", 1)]


def test_a_stream_counts_as_open_until_its_last_response_is_sent(rig: Rig) -> None:
    (client,), _ = postmen(rig, 1)
    open_at_last: list[int] = []
    send = client.send
    client.send = lambda outputs, final: (open_at_last.append(rig.streams.num_open), send(outputs, final))[1]  # type: ignore[method-assign]
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    client.wait()
    assert open_at_last == [1]
    wait_for(lambda: not rig.streams.num_open)


def test_a_metric_that_fails_beside_a_lost_client_stops_no_other_response(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, _ = postmen(rig, 3)
    clients[0].lost = True

    def broken(*_: object) -> None:
        raise KeyError("a metric")

    monkeypatch.setattr(rig.stats, "unsuccessful", broken)
    rig.step(*[SequenceDelta(number, 0, IDS, "length") for number in (1, 2, 3)])
    assert clients[1].wait().texts() == clients[2].wait().texts() == [TEXT]


def at_once(rig: Rig, *deltas: SequenceDelta) -> None:
    """These deltas, one a step, have all arrived before a stream gets a turn."""
    gate = threading.Event()
    rig.streams.run(lambda: gate.wait(10) and None)
    for delta in deltas:
        rig.step(delta)
    rig.streams.run(lambda: None)
    gate.set()


class LosesFirst(Postman):
    """Its first response cannot be sent; later ones could."""

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        self.lost = not any(kind == "sent" for kind, _ in self.log)
        super().send(outputs, final)


def loses_first(rig: Rig) -> LosesFirst:
    client = LosesFirst()
    client.log, client.number = [], 1
    rig.streams.open(make_request(PROMPT, max_tokens=40), client)
    rig.settle()
    return client


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_of_a_stream_follows_a_response_that_was_lost(
    paced: Rig, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Several turns of it were made by then, or its further output waits to be due."""
    monkeypatch.setattr(inbox, "MOST_TOKENS", 1)
    monkeypatch.setattr(output_processor, "SLICE", 0.0)
    monkeypatch.setattr(output_processor, "_TURNS_SECONDS", 60.0)
    paced.streams._pacing.wait = 1000.0 if waits else 0.0  # type: ignore[union-attr]
    client = loses_first(paced)
    at_once(paced, *[SequenceDelta(1, 0, [token]) for token in IDS[:4]])
    assert client.wait().error == ("INTERNAL", "RuntimeError: cannot reach the client")
    assert client.log == [("made", 1)] * (1 if waits else 4) + [("sent", 1), ("failed", 1)]


def test_a_lost_last_response_is_not_followed_by_an_end_without_its_text(rig: Rig) -> None:
    """Tokens of a step behind the end arrive while the metrics are published."""
    client = loses_first(rig)
    late = step_message([SequenceDelta(1, 0, IDS[:1])], STATS)
    rig.stats.settle = lambda: rig.streams._take(time.monotonic(), late)  # type: ignore[method-assign]
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    assert client.wait().error == ("INTERNAL", "RuntimeError: cannot reach the client")
    assert client.log == [("made", 1), ("sent", 1), ("failed", 1)]


def test_what_is_made_does_not_wait_for_the_metrics(rig: Rig) -> None:
    _, log = postmen(rig, 2)
    rig.stats.settle = lambda: log.append(("published", 0))  # type: ignore[method-assign]
    rig.step(SequenceDelta(1, 0, IDS, "length"), SequenceDelta(2, 0, IDS[:2]))
    rig.settle()
    assert log == [("made", 2), ("sent", 2), ("published", 0), ("made", 1), ("sent", 1)]


def test_what_is_made_does_not_wait_for_the_log_probabilities_of_a_prompt(rig: Rig) -> None:
    _, log = postmen(rig, 1)
    client = Postman()
    client.log, client.number = log, 2
    rig.streams.open(make_request(PROMPT, returns=["return_prompt_logprobs"], prompt_logprobs=0), client)
    rig.settle()
    rows = Logprobs.of([[(token, -1.0, 1)] for token in PROMPT])
    rig.step(SequenceDelta(1, 0, IDS[:2]), SequenceDelta(2, 0, IDS[:1], None, None, None, rows))
    rig.settle()
    assert log == [("made", 1), ("sent", 1), ("made", 2), ("sent", 2)]
