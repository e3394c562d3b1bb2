"""Responses about the sequences of a request: all of them, one each, or all that came so far."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from frontend_rig import RecordingClient, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from output_rig import IDS, PROMPT, TEXT, TOKENIZER, Rig, Slow

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs
from inflight.frontend.request.resume import SequenceEnd


def test_every_response_has_all_n_sequences(rig: Rig) -> None:
    client = rig.open("return_finish_reason", "return_token_ids", n=2)
    rig.step(SequenceDelta(1, 0, [IDS[0]]), SequenceDelta(1, 1, [IDS[1]]))
    rig.step(SequenceDelta(1, 0, [IDS[1]], "stop"), SequenceDelta(1, 1, [IDS[2]]))
    rig.step(SequenceDelta(1, 1, [IDS[3]], "length"))
    client.wait()
    assert client.texts() == [TOKENIZER.decode(IDS[:2]), TOKENIZER.decode(IDS[1:4])]
    last = client.responses[-1]
    assert last["finish_reason"].tolist() == [b"stop", b"length"]
    for response in client.responses:
        assert int(response["token_counts"].sum()) == len(response["token_ids"])


@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_those_of_the_prompt_when_it_first_ran(rig: Rig, stream: bool) -> None:
    """The other sequences find the first one's prompt, and so does the next engine after a crash."""
    client = rig.open("return_num_cached_tokens", n=2, stream=stream)
    rig.step(SequenceDelta(1, 0, [IDS[0]], num_cached_tokens=3))
    rig.step(SequenceDelta(1, 1, [IDS[0]], num_cached_tokens=8))
    rig.step(SequenceDelta(1, 0, [IDS[1]], "length", num_cached_tokens=9))
    rig.step(SequenceDelta(1, 1, [IDS[1]], "length"))
    client.wait()
    assert {tuple(response["num_cached_tokens"].tolist()) for response in client.responses} == {(3,)}
    assert all(response["num_cached_tokens"].dtype == "uint32" for response in client.responses)


def joined(client: RecordingClient, index: int) -> str:
    """The text of the responses about one sequence."""
    own = [response for response in client.responses if response["sequence_index"].tolist() == [index]]
    assert all(len(response["text_output"]) == 1 for response in own)
    return "".join(response["text_output"][0].decode() for response in own)


@pytest.mark.parametrize("stream", [True, False])
def test_separate_responses_are_about_one_sequence_each(rig: Rig, stream: bool) -> None:
    client = rig.open("return_finish_reason", "return_token_ids", n=2, separate=True, stream=stream)
    rig.step(SequenceDelta(1, 1, IDS[:2]))
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    rig.settle()
    assert client.finals == 0
    rig.step(SequenceDelta(1, 1, IDS[2:], "stop", IDS[-1]))
    client.wait()
    prompt = "" if stream else "Return"
    assert joined(client, 0) == prompt + TEXT
    assert joined(client, 1) == prompt + TOKENIZER.decode(IDS[:-1])
    ends = {int(r["sequence_index"][0]): r["finish_reason"].tolist() for r in client.responses}
    assert ends == {0: [b"length"], 1: [b"stop"]}
    assert sum(len(response["token_ids"]) for response in client.responses) == 2 * len(IDS)
    if not stream:
        assert [int(response["sequence_index"][0]) for response in client.responses] == [0, 1]


def test_the_end_of_each_sequence_is_told_once(rig: Rig) -> None:
    client = rig.open("return_finish_reason", n=3, separate=True)
    rig.step(SequenceDelta(1, 0, IDS, "length"))
    rig.settle()  # sent: it had text
    rig.step(SequenceDelta(1, 1, [], "stop"))
    rig.settle()  # not sent: nothing to show
    rig.step(SequenceDelta(1, 2, IDS[:1], "length"))
    client.wait()
    ends = [(int(r["sequence_index"][0]), r["finish_reason"][0]) for r in client.responses]
    assert ends == [(0, b"length"), (1, b"stop"), (2, b"length")]


def test_cumulative_responses_repeat_what_came_before(rig: Rig) -> None:
    client = rig.open("return_token_ids", "return_num_output_tokens", "return_logprobs", logprobs=0, cumulative=True)
    for position, token in enumerate(IDS):
        last = position == len(IDS) - 1
        rig.step(SequenceDelta(1, 0, [token], "length" if last else None, None, Logprobs.of([[(token, -1.0, 1)]])))
        rig.settle()
    client.wait()
    for response in client.responses:
        ids = response["token_ids"].tolist()
        assert ids == IDS[: len(ids)]
        assert response["num_output_tokens"].tolist() == response["token_counts"].tolist() == [len(ids)]
        assert TEXT.startswith(response["text_output"][0].decode())
        assert [list(map(int, row)) for row in json.loads(response["logprobs"][0])] == [[token] for token in ids]
    assert client.responses[-1]["text_output"][0].decode() == TEXT
    assert len(client.responses) > 1


def test_cumulative_responses_include_the_output_that_a_request_begins_with(rig: Rig) -> None:
    client = rig.open("return_token_ids", cumulative=True, fields={"output_token_ids": [IDS[:3]]})
    rig.step(SequenceDelta(1, 0, IDS[3:], "length"))
    (response,) = client.wait().responses
    assert (response["text_output"][0].decode(), response["token_ids"].tolist()) == (TEXT, IDS)


@pytest.mark.parametrize("separate", [False, True])
def test_the_engine_goes_on_with_the_sequences_that_have_not_ended(rig: Rig, separate: bool) -> None:
    """One ended by its stop string, one by its length, one elsewhere; each end is told once, the last never."""
    given = [IDS, IDS[:2], IDS[:2], None]
    ends = [None, None, SequenceEnd("length"), None]
    options = {"n": 4, "stop": ["st of"], "separate": separate, "ends": ends}
    client = rig.open("return_finish_reason", "return_token_ids", fields={"output_token_ids": given}, **options)
    assert rig.engine.submitted[1].output_token_ids == [None, IDS[:2], None, None]
    rig.step(SequenceDelta(1, 1, [5], "length"))
    responses = client.wait().responses
    assert [token for response in responses for token in response["token_ids"].tolist()] == [5]
    if separate:
        told = {int(r["sequence_index"][0]): r["finish_reason"][0] for r in responses}
        assert (len(responses), told) == (3, {0: b"stop", 1: b"length", 2: b"length"})
    else:
        assert responses[-1]["finish_reason"].tolist() == [b"stop", b"length", b"length", b"None"]


two_sequences = st.lists(
    st.tuples(st.sampled_from(["token", "finish", "settle", "cancel"]), st.integers(0, 1)), max_size=24
)


@settings(max_examples=40, deadline=None)
@given(moves=two_sequences, stream=st.booleans(), stop=st.booleans(), cumulative=st.booleans(), paced=st.booleans())
def test_separate_and_cumulative_responses_lose_nothing(
    moves: list[tuple[str, int]], stream: bool, stop: bool, cumulative: bool, paced: bool
) -> None:
    """Each of two sequences gets its tokens, in order, and its end at most once, however the steps are cut."""
    rig = Rig(check_seconds=0.001, pacing=Slow() if paced else None)
    fed: list[list[int]] = [[], []]
    ended = [False, False]
    try:
        options = {"n": 2, "separate": True, "cumulative": cumulative, "stop": ["st of"] if stop else []}
        client = rig.open("return_token_ids", "return_finish_reason", stream=stream, **options)
        for move, index in moves:
            if move == "settle":
                rig.settle()
            elif move == "cancel":
                client.cancelled = True
            elif not ended[index]:
                fed[index].append(IDS[len(fed[index]) % len(IDS)])
                ended[index] = move == "finish"
                rig.step(SequenceDelta(1, index, fed[index][-1:], "length" if ended[index] else None))
        rig.settle()
    finally:
        rig.streams.stop("over")
    assert client.finals == 1
    for index in range(2):
        own = [r for r in client.responses if r["sequence_index"].tolist() == [index]]
        parts = [response["token_ids"].tolist() for response in own]
        got = (parts or [[]])[-1] if cumulative else [token for part in parts for token in part]
        assert fed[index][: len(got)] == got
        ends = [response["finish_reason"][0] for response in own if response["finish_reason"][0] != b"None"]
        assert len(ends) <= 1
        if client.error is None:
            assert len(ends) == 1
            assert ends == [b"stop"] or got == fed[index]
    assert not rig.errors


def test_parts_that_are_made_are_sent_though_another_cannot_be(rig: Rig) -> None:
    class Client(RecordingClient):
        def prepare(self, outputs: dict[str, Any], final: bool) -> Callable[[], None]:
            if outputs["sequence_index"].tolist() == [1]:
                raise MemoryError("no shared memory")
            return super().prepare(outputs, final)

    client = Client()
    rig.streams.open(make_request(PROMPT, returns=["return_token_ids"], n=2, separate=True), client)
    rig.step(SequenceDelta(1, 0, IDS, "length"), SequenceDelta(1, 1, IDS, "length"))
    assert client.wait().error == ("INTERNAL", "MemoryError: no shared memory")
    assert [response["token_ids"].tolist() for response in client.responses] == [IDS]
