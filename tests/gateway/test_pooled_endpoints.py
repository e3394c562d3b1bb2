"""Embeddings, scores, rankings and classes: shapes, what reaches Triton, limits and refusals."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import numpy as np
import pytest
from scripted_client import LABELS, ScriptedClient, text, vectors

from inflight_client import InvalidRequestError, UnavailableError
from inflight_client.pooling import Pooled
from inflight_gateway import embeddings

DOCUMENTS = ["three", "fourteen chars", "one"]


def asked(front: Any) -> dict[str, Any]:
    """The request for vectors that Triton got last."""
    found: dict[str, Any] = front.client.requests[-1].pooling
    return found


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["abc", [7]], ["abc", [7]]),
    ],
)
async def test_every_form_of_input_is_embedded(start, given, inputs):
    front = await start(lambda request: vectors(request))
    answer = (await front.post("/v1/embeddings", {"model": "demo", "input": given})).json()
    assert asked(front) == {"task": "embed", "inputs": inputs}
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert answer["object"] == "list" and answer["model"] == "demo" and answer["id"].startswith("embd-")
    for index, (one, row) in enumerate(zip(inputs, answer["data"], strict=True)):
        assert row == {"object": "embedding", "index": index, "embedding": [len(one), 0.1, -0.5, 1e-8]}
    tokens = sum(map(len, inputs))
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


async def test_keys_of_embeddings_reach_the_model(start):
    front = await start(lambda request: vectors(request), tenant_header="x-tenant")
    body = {
        "input": "abc",
        "dimensions": 2,
        "normalize": False,
        "truncate_prompt_tokens": 2,
        "truncation_side": "left",
        "instruction": "query",
        "priority": 3,
        "cache_salt": "s",
        "user": "body",
        "request_id": "mine",
        "add_special_tokens": True,
    }
    answer = await front.post("/v1/embeddings", body, headers={"x-tenant": "header"})
    assert len(answer.json()["data"][0]["embedding"]) == 2 and answer.json()["usage"]["prompt_tokens"] == 2
    assert "x-inflight-warning" not in answer.headers and answer.headers["x-request-id"] == "mine"
    request = front.client.requests[-1]
    assert request.pooling == {
        "task": "embed",
        "inputs": ["abc"],
        "dimensions": 2,
        "normalize": False,
        "instruction": "query",
        "truncate_prompt_tokens": 2,
        "truncation_side": "left",
    }
    assert (request.request_priority, request.cache_salt, request.tenant) == (3, "s", "header")
    assert request.request_id == "mine" and not request.stream and request.timeout == 600
    await front.post("/v1/embeddings", {"input": "a", "use_activation": True, "user": "body"})
    assert asked(front)["normalize"] is True and front.client.requests[-1].tenant == "body"


async def test_openais_client_takes_numbers_and_base64(start):
    front = await start(lambda request: vectors(request, 64))
    kind = "float"
    numbers = await front.openai.embeddings.create(model="demo", input=["a", "bc"], encoding_format=kind)
    raw = await front.openai.embeddings.create(model="demo", input=["a", "bc"])  # base64, which it decodes
    raw_text = (await front.post("/v1/embeddings", {"input": "bc", "encoding_format": "base64"})).json()
    decoded = np.frombuffer(base64.b64decode(raw_text["data"][0]["embedding"]), dtype="<f4")
    expected = [2, 0.1, -0.5, 1e-8, *[0.25] * 60]
    np.testing.assert_array_equal(decoded, np.array(expected, np.float32))
    for answer in (numbers, raw):
        np.testing.assert_array_equal(np.array(answer.data[1].embedding, np.float32), decoded)
        assert answer.usage.total_tokens == 3


async def test_a_chat_is_one_input(start):
    front = await start(lambda request: vectors(request))

    async def tokenize(prompt=None, *, model, messages, **options):
        front.client.questions.append(options)
        return {"tokens": [1, 2, 3]}

    front.client.tokenize = tokenize
    messages = [{"role": "user", "content": "Hi"}]
    answer = await front.post("/v1/embeddings", {"messages": messages, "chat_template_kwargs": {"a": 1}})
    assert len(answer.json()["data"]) == 1 and asked(front)["inputs"] == [[1, 2, 3]]
    assert front.client.questions[-1] == {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": False}
    await front.post("/classify", {"messages": messages, "add_generation_prompt": True})
    assert front.client.questions[-1] == {"add_generation_prompt": True} and asked(front)["task"] == "classify"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "d", [["q", "d"]]),
        ("q", ["d", {"text": "e"}], [["q", "d"], ["q", "e"]]),
        (["q"], ["d", "e"], [["q", "d"], ["q", "e"]]),
        (["q", "r"], ["d", "e"], [["q", "d"], ["r", "e"]]),
    ],
)
async def test_pairs_are_scored(start, path, names, first, second, pairs):
    front = await start(lambda request: vectors(request))
    body = {names[0]: first, names[1]: second, "use_activation": False, "instruction": "i"}
    answer = (await front.post(path, body)).json()
    assert asked(front) == {"task": "score", "inputs": pairs, "raw_scores": True, "instruction": "i"}
    assert answer["object"] == "list" and answer["id"].startswith("score-")
    scores = [one["score"] for one in answer["data"]]
    assert scores == pytest.approx([len(pair[1]) / 100 for pair in pairs])
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(len(pairs))]
    assert answer["usage"]["total_tokens"] == 2 * len(pairs)


@pytest.mark.parametrize(("path", "version"), [("/rerank", None), ("/v1/rerank", "1"), ("/v2/rerank", "2")])
async def test_documents_come_in_the_order_of_their_scores(start, path, version):
    front = await start(lambda request: vectors(request))
    body = {"query": "q", "documents": ["three", {"text": "fourteen chars"}, "one"]}
    answer = (await front.post(path, body)).json()
    assert asked(front) == {"task": "score", "inputs": [["q", one] for one in DOCUMENTS]}
    assert [one["index"] for one in answer["results"]] == [1, 0, 2]
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[i] for i in (1, 0, 2)]
    assert answer["results"][0]["relevance_score"] == pytest.approx(0.14)
    assert answer["usage"]["total_tokens"] == 25 and answer["id"].startswith("rerank-")
    billed = {"api_version": {"version": version}, "billed_units": {"search_units": 1}}
    assert answer.get("meta") == (billed if version else None)
    few = (await front.post(path, {**body, "top_n": 2, "return_documents": False})).json()["results"]
    assert [set(one) for one in few] == [{"index", "relevance_score"}] * 2 and [one["index"] for one in few] == [1, 0]
    assert len((await front.post(path, {**body, "top_n": 0})).json()["results"]) == 3, "as in vLLM"


async def test_equal_scores_keep_the_given_order_and_search_units_are_hundreds(start):
    front = await start(lambda request: vectors(request))
    answer = (await front.post("/v2/rerank", {"query": "q", "documents": ["d"] * 101})).json()
    assert [one["index"] for one in answer["results"]] == list(range(101))
    assert answer["meta"]["billed_units"] == {"search_units": 2}


async def test_a_document_that_cannot_be_shortened_ends_the_request_and_all_questions(start, monkeypatch):
    front = await start(lambda request: vectors(request))
    asked_for = []

    async def tokenize(prompt: str, *, model: str, **options: Any) -> dict[str, Any]:
        asked_for.append(prompt)
        await asyncio.sleep(0)
        raise UnavailableError("the queue is full")

    monkeypatch.setattr(front.client, "tokenize", tokenize)
    body = {"query": "q", "documents": ["a document"] * 200, "max_tokens_per_doc": 4}
    assert (await front.post("/rerank", body)).status_code in (429, 503)
    assert len(asked_for) <= 32


async def test_long_documents_are_shortened(start):
    front = await start(lambda request: vectors(request))
    documents = ["abcdef", "ab", "ÄÖÜ"]
    answer = (await front.post("/rerank", {"query": "q", "documents": documents, "max_tokens_per_doc": 4})).json()
    assert asked(front)["inputs"] == [["q", "abcd"], ["q", "ab"], ["q", "ÄÖÜ"]]
    assert answer["results"][0]["document"]["text"] == "abcdef", "the answer has it whole"
    assert front.client.questions == [{"add_special_tokens": False}] * 2, "the second is short enough to tell"


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_texts_are_classified(start, path):
    front = await start(lambda request: vectors(request))
    answer = (await front.post(path, {"input": ["g", "b"], "softmax": False})).json()
    assert asked(front) == {"task": "classify", "inputs": ["g", "b"], "raw_scores": True}
    assert answer["data"] == [
        {"index": 0, "label": LABELS[1], "probs": [0.25, 0.75], "num_classes": 2},
        {"index": 1, "label": LABELS[0], "probs": [0.75, 0.25], "num_classes": 2},
    ]
    assert answer["object"] == "list" and answer["id"].startswith("classify-")


# -- refusals ----------------------------------------------------------------------------------------

TOO_LONG = "a prompt of 5000 tokens: it must be 1 to 2048 long"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {}, "input", "exactly one of input and messages"),
        ("/v1/embeddings", {"input": "a", "messages": []}, "input", "exactly one"),
        ("/v1/embeddings", {"input": []}, "input", "1 to 3 are allowed (max_inputs)"),
        ("/v1/embeddings", {"input": ["a"] * 4}, "input", "4 entries came; 1 to 3"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input", "input[1]: a text"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input", "input[0]"),
        ("/v1/embeddings", {"input": [[1], [True]]}, "input", "input[1]"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input", "a text, a list"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "float or base64"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "up"}, "truncation_side", "left or right"),
        ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize", "contradict"),
        ("/v1/embeddings", {"input": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "only for messages"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "not supported"),
        ("/v1/embeddings", {"input": "a", "dimensions": "x"}, "dimensions", "int"),
        ("/v1/embeddings", {"input": "a", "request_id": "ä"}, "request_id", "letters"),
        ("/v1/embeddings", {"input": "a", "priority": 2**40}, "priority", "INT32"),
        ("/v1/embeddings", {"input": "\ud800"}, None, "not JSON"),
        ("/v1/embeddings", {"input": ["a", "b\x00"]}, "input", f"input[1]: {TOO_LONG}"),
        ("/v1/embeddings", {"messages": [{"role": "user"}], "chat_template": "x"}, "chat_template", "no templates"),
        ("/classify", {"input": ["\x00"]}, "input", f"input[0]: {TOO_LONG}"),
        ("/score", {"text_1": "a"}, "text_1", "got text_1; two keys"),
        ("/score", {"text_1": "a", "data_2": "b"}, "text_1", "got data_2, text_1"),
        ("/score", {}, "text_1", "none of them"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 texts came, and 1 of text_2"),
        ("/score", {"queries": "a", "items": ["b"] * 4}, "items", "4 entries came"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "0 entries"),
        ("/score", {"text_1": "a", "text_2": [[5]]}, "text_2", "text_2[0]: a text"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1", "not empty"),
        ("/score", {"text_1": "a", "text_2": ["b", "\x00"]}, "text_2", f"text_2[1]: {TOO_LONG}"),
        ("/rerank", {"query": "q"}, "documents", "missing"),
        ("/rerank", {"documents": ["d"]}, "query", "missing"),
        ("/rerank", {"query": ["q"], "documents": ["d"]}, "query", "a text"),
        ("/rerank", {"query": "q", "documents": "d"}, "documents", "a list"),
        ("/rerank", {"query": "q", "documents": []}, "documents", "0 entries"),
        ("/rerank", {"query": "q", "documents": ["d"] * 4}, "documents", "4 entries"),
        ("/rerank", {"query": "q", "documents": [{"title": "d"}]}, "documents", "documents[0]"),
        ("/rerank", {"query": "q", "documents": ["d"], "top_n": -1}, "top_n", "at least 1"),
        ("/rerank", {"query": "q", "documents": ["d"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "at least 1"),
        ("/rerank", {"query": "q", "documents": ["d"], "rank_fields": ["a"]}, "rank_fields", "not supported"),
        ("/rerank", {"query": "q", "documents": ["\x00"]}, "documents", f"documents[0]: {TOO_LONG}"),
    ],
)
async def test_the_error_names_the_key(start, path, body, param, says):
    front = await start(lambda request: vectors(request), max_inputs=3)
    refused = await front.http.post(path, content=json.dumps(body))
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == param, error
    assert says in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("task='embed': not a task of this checkpoint: it has score", "model"),
        ("dimensions=9: must be 1 to 4", "dimensions"),
        ('normalize=True: only for task "embed"', "use_activation"),
        ("inputs has 5 entries: at most 2 are allowed (the lesser of ...)", "input"),
        ("truncate_prompt_tokens=0: must be 1 to 2048, or -1 for what fits", "truncate_prompt_tokens"),
    ],
)
async def test_errors_of_the_backend_name_the_bodys_key(start, message, param):
    front = await start(lambda request: [InvalidRequestError(message)])
    refused = await front.post("/v1/embeddings", {"input": "a"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert "inputs" not in refused.json()["error"]["message"]


async def test_other_backends_and_models_are_refused_by_name(start):
    client = ScriptedClient(vectors, models=("demo", "other"))
    client.inputs["other"] = tuple(name for name in client.inputs["other"] if name != "pooling")
    front = await start(client)
    for model, status in (("other", 400), ("ghost", 404)):
        refused = await front.post("/v1/embeddings", {"model": model, "input": "a"})
        assert refused.status_code == status and refused.json()["error"]["param"] == "model"
    assert not client.requests


async def test_keys_limits_and_refusals_apply_as_elsewhere(start):
    front = await start(
        lambda request: [UnavailableError("the queue is full: 4 sequences are open", code="UNAVAILABLE")],
        api_keys=("key",),
        max_body_bytes=100,
    )
    key = {"Authorization": "Bearer key"}
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "a"}),
    ):
        assert (await front.post(path, body)).status_code == 401
        full = await front.post(path, body, headers=key)
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        assert (await front.post(path, {**body, "user": "x" * 100}, headers=key)).status_code == 413
        seen = (await front.http.get("/metrics", headers=key)).text
        assert f'inflight_gateway_requests_total{{endpoint="{path}",status="429"}} 1.0' in seen


async def test_requests_for_vectors_count_as_open(start):
    go_on = asyncio.Event()
    front = await start(lambda request: [go_on, *vectors(request)], max_open_requests=1)
    first = asyncio.create_task(front.post("/v1/embeddings", {"input": "a"}))
    while not front.client.requests:
        await asyncio.sleep(0)
    second = await front.post("/rerank", {"query": "a", "documents": ["b"]})
    assert second.status_code == 429 and second.json()["error"]["code"] == "too_many_requests"
    go_on.set()
    assert (await first).status_code == 200 and front.gateway.metrics.open_requests == 0


async def test_a_client_that_hangs_up_cancels(start):
    front = await start(lambda request: [asyncio.Event()])
    sent = asyncio.create_task(front.post("/v1/embeddings", {"input": ["a", "b"]}))
    while not front.client.streams:
        await asyncio.sleep(0)
    sent.cancel()
    await asyncio.wait_for(front.client.streams[0].cancelled.wait(), 10)


async def test_a_response_without_vectors_or_with_wrong_ones_is_an_error_of_the_server(start):
    table = Pooled(np.zeros((1, 3), np.float32), np.ones(1, np.int32), [])
    for script in (lambda request: [], lambda request: text("a")):
        failed = await (await start(script)).post("/v1/embeddings", {"input": "a"})
        assert failed.status_code == 500 and "without its vectors" in failed.json()["error"]["message"]
    front = await start(lambda request: [table])
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/classify", {"input": "a"})):
        failed = await front.post(path, body)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "upstream_error"


async def test_others_are_answered_while_vectors_are_encoded(start, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    encode = embeddings._encoded

    def slowly(*values: Any) -> list[bytes]:
        begun.set()
        assert go_on.wait(10), "the event loop was blocked"
        return encode(*values)

    monkeypatch.setattr(embeddings, "_encoded", slowly)
    front = await start(lambda request: vectors(request))
    large = asyncio.create_task(front.post("/v1/embeddings", {"input": "a"}))
    while not begun.is_set():
        assert (await front.http.get("/health")).status_code == 200
    assert (await front.http.get("/health")).status_code == 200
    go_on.set()
    assert (await large).status_code == 200


async def test_token_ids_far_beyond_the_context_are_refused_before_they_are_converted(start):
    front = await start(lambda request: vectors(request))
    answer = await front.post("/v1/embeddings", {"input": [[7], [7] * 500_000]})
    assert answer.status_code == 400 and not front.client.requests
    assert "input[1]: 500000 token ids came; at most 2048 are allowed" in answer.json()["error"]["message"]
    assert (await front.post("/v1/embeddings", {"input": [7] * 3000})).status_code == 200, "the model decides"
    cut = {"input": [7] * 140_000, "truncate_prompt_tokens": -1}
    assert (await front.post("/v1/embeddings", cut)).status_code == 200, "the server cuts them"


async def test_an_answer_in_many_pieces_is_whole(start):
    table = np.random.default_rng(0).standard_normal((100, 40)).astype(np.float32)
    front = await start(lambda request: [Pooled(table, np.ones(100, np.int32), [])])
    answer = await front.post("/v1/embeddings", {"input": ["a"] * 100})
    assert int(answer.headers["content-length"]) == len(answer.content)
    rows = answer.json()["data"]
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows], np.float32), table)
    assert [row["index"] for row in rows] == list(range(100))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "q" * 3000, "documents": ["d"] * 5}),
        ("/v1/score", {"text_1": "q" * 3000, "text_2": ["d"] * 5}),
    ],
)
async def test_a_text_in_every_pair_does_not_make_more_of_a_body_than_one_may_have(start, path, body):
    """With a query of 14 MB and 2,048 documents it would be 28 GB."""
    front = await start(lambda request: vectors(request), max_body_bytes=10_000)
    answer = await front.post(path, {"model": "demo", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and "15005" in error["message"] and "10000" in error["message"]
    assert error["param"] in ("documents", "text_2") and not front.client.requests
    key = "documents" if path == "/rerank" else "text_2"
    assert (await front.post(path, {"model": "demo", **body, key: ["d"] * 3})).status_code == 200
