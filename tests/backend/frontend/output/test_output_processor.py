"""Streams that go well: text as it comes, one response, output that a request begins with."""

from __future__ import annotations

import threading

from output_rig import IDS, PROMPT, TEXT, TOKENIZER, Rig, wait_for

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs


def test_streaming_text_and_one_final(rig: Rig) -> None:
    client = rig.open("return_finish_reason", "return_num_output_tokens", "return_num_input_tokens")
    rig.feed(IDS)
    client.wait()
    assert client.texts() == [TEXT]
    reasons = [response["finish_reason"][0] for response in client.responses]
    assert reasons == [b"None"] * (len(reasons) - 1) + [b"length"]
    assert sum(int(response["num_output_tokens"][0]) for response in client.responses) == len(IDS)
    assert all(response["num_input_tokens"].tolist() == [len(PROMPT)] for response in client.responses)
    assert rig.engine.released == [1]
    assert rig.engine.aborted == []
    wait_for(lambda: rig.stats.streams)
    assert len(rig.stats.first_tokens) == 1
    assert rig.stats.num_tokens == len(IDS)


def test_with_an_interval_responses_after_the_first_wait_for_more_tokens() -> None:
    rig = Rig(interval=3)
    client = rig.open("return_num_output_tokens", max_tokens=40)
    ids = TOKENIZER.encode(4 * TEXT, add_special_tokens=False)
    for position, token in enumerate(ids):
        rig.step(SequenceDelta(1, 0, [token], "length" if position == len(ids) - 1 else None))
        rig.settle()  # else the sender coalesces them itself
    client.wait()
    rig.streams.stop("test over")
    first, *more, _ = [int(response["num_output_tokens"][0]) for response in client.responses]
    assert first < 3, "the first text is not held back"
    assert more and all(count >= 3 for count in more)
    assert client.texts() == [4 * TEXT]


def test_without_streaming_there_is_one_response_with_the_prompt(rig: Rig) -> None:
    client = rig.open("return_token_ids", stream=False)
    rig.feed(IDS)
    client.wait()
    assert len(client.responses) == 1
    assert client.texts() == ["Return" + TEXT]
    assert client.responses[0]["token_ids"].tolist() == IDS
    assert client.responses[0]["token_counts"].tolist() == [len(IDS)]


def test_a_stream_that_falls_behind_gets_its_text_in_one_response(rig: Rig) -> None:
    gate = threading.Event()
    client = rig.open("return_token_ids")
    rig.streams._events.put(lambda: gate.wait(10) and None)
    rig.feed(IDS)
    gate.set()
    client.wait()
    assert len(client.responses) == 1
    assert client.texts() == [TEXT]
    assert client.responses[0]["token_ids"].tolist() == IDS


def test_tokens_without_text_cause_no_response(rig: Rig) -> None:
    ids = TOKENIZER.encode("😀", add_special_tokens=False)
    client = rig.open()
    rig.feed(ids, finish=None)
    assert client.arrived.wait(20)
    rig.feed([IDS[0]])
    client.wait()
    assert client.responses[0]["text_output"][0].decode().endswith("😀")


def test_cached_tokens_are_zero_where_no_engine_ran_the_request(rig: Rig) -> None:
    fields = {"output_token_ids": [IDS]}
    client = rig.open("return_num_cached_tokens", fields=fields, ends=[("length", None)], max_tokens=len(IDS))
    assert client.wait().responses[-1]["num_cached_tokens"].tolist() == [0]


def test_an_interval_counts_tokens_of_runs() -> None:
    rig = Rig(interval=4)
    client = rig.open("return_num_output_tokens", max_tokens=40)
    for run in (1, 3, 2, 2):
        rig.step(SequenceDelta(1, 0, (4 * IDS)[:run]))
        rig.settle()
    rig.step(SequenceDelta(1, 0, [], "length"))
    client.wait()
    rig.streams.stop("test over")
    assert [int(response["num_output_tokens"][0]) for response in client.responses] == [1, 5, 2]


def test_a_stream_that_begins_with_output_sends_only_what_comes_after_it(rig: Rig) -> None:
    given = {"output_token_ids": [IDS[:3], None]}
    wanted = ("return_token_ids", "return_cumulative_logprob", "return_finish_reason", "return_num_output_tokens")
    client = rig.open(*wanted, n=2, logprobs=0, fields=given, cumulative_logprobs=[-7.0, -2.0])
    assert rig.engine.submitted[1].output_token_ids == [IDS[:3], None]
    rig.step(SequenceDelta(1, 0, [IDS[3]], None, None, Logprobs.of([[(IDS[3], -1.0, 1)]])))
    rig.settle()
    assert len(rig.stats.first_tokens) == 1
    rig.step(SequenceDelta(1, 0, IDS[4:], "length", None, Logprobs.of([(token, -1.0, 1)] for token in IDS[4:])))
    client.wait()
    assert client.texts() == [TEXT.removeprefix(TOKENIZER.decode(IDS[:3])), ""]
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS[3:]
    last = client.responses[-1]
    assert last["cumulative_logprob"].tolist() == [-7.0 - len(IDS[3:]), -2.0]
    assert last["finish_reason"].tolist() == [b"length", b"None"], "the other one ended elsewhere"
    wait_for(lambda: rig.stats.streams)
    assert rig.stats.streams[0].num_output_tokens == len(IDS[3:])


def test_a_complete_output_ends_at_once_without_the_engine(rig: Rig) -> None:
    wanted = ("return_token_ids", "return_finish_reason", "return_num_output_tokens")
    client = rig.open(*wanted, stop=["st of"], fields={"output_token_ids": [IDS]})
    (response,) = client.wait().responses
    assert (client.texts(), response["token_ids"].tolist()) == ([""], [])
    assert (response["finish_reason"].tolist(), response["num_output_tokens"].tolist()) == ([b"stop"], [0])
    assert (rig.engine.submitted, rig.engine.aborted) == ({}, [])
    wait_for(lambda: not rig.streams.num_open_sequences)
    assert [stream.num_output_tokens for stream in rig.stats.streams] == [0]
