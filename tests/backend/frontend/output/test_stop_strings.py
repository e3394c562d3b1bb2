"""Stop strings and stop tokens end a stream, also inside a run of tokens and while responses wait."""

from __future__ import annotations

import json

from output_rig import IDS, TEXT, TOKENIZER, Rig

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs


def test_a_stop_string_ends_the_stream_and_aborts_the_sequence(rig: Rig) -> None:
    client = rig.open("return_finish_reason", "return_stop_reason", "return_token_ids", stop=["st of"], stream=True)
    rig.feed(IDS, finish=None)
    client.wait()
    assert client.texts() == [" the li"]
    assert client.responses[-1]["stop_reason"].tolist() == [b'"st of"']
    assert client.responses[-1]["finish_reason"].tolist() == [b"stop"]
    assert rig.engine.aborted == [(1, 0)]
    sent = [token for response in client.responses for token in response["token_ids"].tolist()]
    assert TOKENIZER.decode(sent).startswith(" the list of")
    assert len(sent) < len(IDS)  # the tokens behind the match are not counted
    rig.feed(IDS)  # late deltas
    rig.open()
    assert not rig.errors


def test_a_stop_string_in_the_last_token_needs_no_abort(rig: Rig) -> None:
    client = rig.open("return_finish_reason", stop=["names"], include_stop_str_in_output=True)
    rig.feed(IDS, finish="length")
    client.wait()
    assert client.texts() == [TEXT]
    assert client.responses[-1]["finish_reason"].tolist() == [b"stop"]
    assert rig.engine.aborted == []


def test_stop_strings_wait_for_min_tokens(rig: Rig) -> None:
    client = rig.open(stop=[" the", "names"], min_tokens=2)
    rig.feed(IDS, finish="length")
    assert client.wait().texts() == [" the list of "]


def test_a_stop_token_counts_but_is_not_shown(rig: Rig) -> None:
    for include in (False, True):
        client = rig.open("return_token_ids", include_stop_str_in_output=include)
        request_id = 1 + include
        rig.step(SequenceDelta(request_id, 0, [IDS[0]]))
        rig.step(SequenceDelta(request_id, 0, [IDS[1]], "stop", IDS[1]))
        client.wait()
        assert client.texts() == [TOKENIZER.decode(IDS[: 1 + include])]
        assert sum(response["token_counts"].sum() for response in client.responses) == 2


def test_text_held_back_comes_at_the_end(rig: Rig) -> None:
    client = rig.open(stop=["names of"])
    rig.feed(IDS)
    assert client.wait().texts() == [TEXT]


def test_a_stop_string_inside_a_run_cuts_its_tokens_and_logprobs(rig: Rig) -> None:
    wanted = ("return_token_ids", "return_logprobs", "return_cumulative_logprob")
    client = rig.open(*wanted, stop=["st of"], logprobs=0)
    rig.step(SequenceDelta(1, 0, IDS, None, None, Logprobs.of([(token, -0.5, 1)] for token in IDS)))
    (response,) = client.wait().responses
    assert client.texts() == [" the li"]
    kept = response["token_ids"].tolist()
    assert kept == IDS[: len(kept)] and TOKENIZER.decode(kept).startswith(" the list of") and len(kept) < len(IDS)
    assert len(json.loads(response["logprobs"][0])) == len(kept)
    assert response["cumulative_logprob"].tolist() == [-0.5 * len(kept)]
    assert rig.engine.aborted == [(1, 0)]


def test_a_stop_string_is_found_at_once_while_responses_wait(paced: Rig) -> None:
    client = paced.open(stop=["st of"])
    paced.step(SequenceDelta(1, 0, IDS[:1]))
    paced.settle()
    paced.streams._pacing.wait = 1000.0  # type: ignore[union-attr]
    for token in IDS[1:]:
        paced.step(SequenceDelta(1, 0, [token]))
    assert client.wait().texts() == [" the li"]
    assert paced.engine.aborted == [(1, 0)]
