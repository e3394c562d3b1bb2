"""Log probabilities of responses, in the formats of vllm_backend and TensorRT-LLM."""

from __future__ import annotations

import json

from output_rig import IDS, PROMPT, TEXT, TOKENIZER, Rig, wait_for

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs


def test_the_chosen_tokens_log_probabilities_as_tensorrt_llm_sends_them(rig: Rig) -> None:
    client = rig.open("return_log_probs", n=2, logprobs=0, stream=False)
    for index, count in ((0, 3), (1, 2)):
        entries = [[(token, -1.0 - k, 1)] for k, token in enumerate(IDS[:count])]
        rig.step(SequenceDelta(1, index, IDS[:count], "length", None, Logprobs.of(entries)))
    (response,) = client.wait().responses
    assert response["cum_log_probs"].tolist() == [-6.0, -3.0]
    assert response["output_log_probs"].tolist() == [[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0]]
    assert "logprobs" not in response


def test_without_detokenization_there_are_tokens_and_no_text(rig: Rig) -> None:
    client = rig.open("return_logprobs", "return_num_output_tokens", logprobs=0, detokenize=False)
    rig.step(SequenceDelta(1, 0, [IDS[0]], None, None, Logprobs.of([[(IDS[0], -1.0, 1)]])))
    assert client.arrived.wait(20), "a token is worth a response"
    rig.step(SequenceDelta(1, 0, IDS[1:], "length", None, Logprobs.of([(token, -1.0, 1)] for token in IDS[1:])))
    client.wait()
    assert client.texts() == [""]
    assert sum(int(response["num_output_tokens"][0]) for response in client.responses) == len(IDS)
    rows = [row for response in client.responses for row in json.loads(response["logprobs"][0])]
    assert rows[0] == {str(IDS[0]): {"logprob": -1.0, "rank": 1, "decoded_token": None}}


def test_logprobs_have_vllm_backends_format(rig: Rig) -> None:
    client = rig.open("return_logprobs", "return_cumulative_logprob", logprobs=1)
    entry = [(IDS[0], -1.5, 2), (7, -0.25, 1)]
    rig.step(SequenceDelta(1, 0, [IDS[0]], None, None, Logprobs.of([entry])))
    rig.step(SequenceDelta(1, 0, [IDS[1]], "length", None, Logprobs.of([[(IDS[1], float("-inf"), 1)]])))
    client.wait()
    rows = [row for response in client.responses for row in json.loads(response["logprobs"][0])]
    assert rows[0] == {
        str(IDS[0]): {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.token_text(IDS[0])},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": TOKENIZER.token_text(7)},
    }
    assert rows[1][str(IDS[1])]["logprob"] == -9999.0
    assert client.responses[0]["cumulative_logprob"].tolist() in ([-1.5], [float("-inf")])


def test_logprobs_are_null_unless_requested(rig: Rig) -> None:
    client = rig.open("return_logprobs")
    rig.feed(IDS)
    assert {response["logprobs"][0] for response in client.wait().responses} == {b"null"}


def test_prompt_logprobs_come_complete_with_the_first_response_only(rig: Rig) -> None:
    client = rig.open("return_prompt_logprobs", prompt_logprobs=0)
    rest = [[(token, -1.0, 1)] for token in PROMPT[1:]]
    rig.step(SequenceDelta(1, 0, [], None, None, None, Logprobs([0])))
    rig.step(SequenceDelta(1, 0, [IDS[0]], None, None, None, Logprobs.of(rest)))
    assert client.arrived.wait(20)
    rig.feed(IDS[1:])
    client.wait()
    first, *others = client.responses
    rows = json.loads(first["prompt_logprobs"][0])
    assert [None if row is None else list(row) for row in rows] == [None, *([str(t)] for t in PROMPT[1:])]
    assert others
    assert not any("prompt_logprobs" in response for response in others)


def test_a_run_of_tokens_counts_as_one_step(rig: Rig) -> None:
    """Accepted drafts come as several tokens at once: a response for the run, one first token, logprobs for each."""
    client = rig.open("return_token_ids", "return_logprobs", "return_cumulative_logprob", logprobs=0)
    for run, finish in ((IDS[:3], None), (IDS[3:], "length")):
        rig.step(SequenceDelta(1, 0, run, finish, None, Logprobs.of([(token, -0.5, 1)] for token in run)))
    client.wait()
    assert client.texts() == [TEXT]
    assert [token for response in client.responses for token in response["token_ids"].tolist()] == IDS
    rows = [row for response in client.responses for row in json.loads(response["logprobs"][0])]
    assert [list(row) for row in rows] == [[str(token)] for token in IDS]
    assert client.responses[-1]["cumulative_logprob"].tolist() == [-0.5 * len(IDS)]
    wait_for(lambda: rig.stats.streams)
    assert len(rig.stats.first_tokens) == 1
    assert rig.stats.num_tokens == len(IDS)
