"""Embeddings and rankings through a gateway and a real tritonserver, from the demo model, which chats meanwhile."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from inflight_client import Client
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

TEXTS = ["Return a list of", "def main():", "the number of items in the list", "x"]
QUERY = "Return the number of"


@pytest.fixture(scope="module")
def url(server: TritonServer) -> Iterator[str]:
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(), ServerOptions(port=port, exit_timeout=2))
    gateway.start(server.grpc_address)
    yield gateway.url
    gateway.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def direct(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_address) as client:
        yield client


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(url.removesuffix("/v1") + path, json=body, timeout=60)


def test_embeddings_have_the_same_bits_by_every_way(client: OpenAI, direct: Client, server: TritonServer) -> None:
    kind: Any = "float"
    answer = client.embeddings.create(model="demo", input=TEXTS, encoding_format=kind)
    ids = [direct.tokenize(text)["tokens"] for text in TEXTS]
    assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.model == "demo"
    vectors = np.array([one.embedding for one in answer.data], np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    as_base64 = client.embeddings.create(model="demo", input=ids)
    alone = client.embeddings.create(model="demo", input=TEXTS[2])
    found = direct.embed(TEXTS)
    with Client(server.http_address, protocol="http", model="demo") as over_http:
        by_http = over_http.embed(TEXTS).vectors
    assert found.token_counts.tolist() == [len(one) for one in ids]
    for other in ([one.embedding for one in as_base64.data], found.vectors, by_http):
        np.testing.assert_array_equal(np.array(other, np.float32), vectors)
    np.testing.assert_array_equal(np.array(alone.data[0].embedding, np.float32), vectors[2])


def test_a_ranking_beside_a_chat_that_streams(client: OpenAI, direct: Client, url: str) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": QUERY, "max_tokens": 1000, "temperature": 0}
    alone = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    query, *vectors = direct.embed([QUERY, *TEXTS]).vectors
    cosines = np.array([vector @ query for vector in vectors])
    answers: list[httpx.Response] = []
    ranking = {"query": QUERY, "documents": [{"text": text} for text in TEXTS]}
    asking = threading.Thread(target=lambda: answers.append(post(url, "/v2/rerank", ranking)))
    pieces = []
    for event in client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
        if not pieces:
            asking.start()
        pieces.append(event.choices[0].text)
    asking.join()
    assert "".join(pieces) == alone
    results = answers[0].json()["results"]
    assert [one["index"] for one in results] == np.argsort(-cosines, kind="stable").tolist()
    scores = [one["relevance_score"] for one in results]
    np.testing.assert_allclose(scores, np.sort(cosines)[::-1], rtol=1e-5, atol=1e-6)
    assert [one["document"]["text"] for one in results] == [TEXTS[one["index"]] for one in results]
    scored = post(url, "/score", {"text_1": QUERY, "text_2": TEXTS}).json()
    assert sorted((one["score"] for one in scored["data"]), reverse=True) == scores


def test_refusals_name_the_key(client: OpenAI, url: str) -> None:
    for body, param, says in (
        ({"input": ["a", "b " * 20_000]}, "input", "input[1]: "),
        ({"input": [[10**6]]}, "input", "not in the vocabulary"),
        ({"input": "a", "dimensions": 3}, "dimensions", "matryoshka"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be 1 to"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/embeddings", body={"model": "demo", **body}, cast_to=object)
        assert caught.value.param == param and says in str(caught.value)
    for path, body, param in (
        ("/classify", {"input": "a"}, "model"),
        ("/rerank", {"query": "q", "documents": ["a", "b " * 20_000]}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"], "use_activation": "x"}, "use_activation"),
    ):
        refused = post(url, path, body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_truncation_and_shortened_documents(direct: Client, url: str) -> None:
    long = "the number of items in the list and more of it"
    begin, *ids = direct.tokenize(long)["tokens"]  # the tokenizer puts a token in front, which stays
    for side, kept in (("right", ids[:4]), ("left", ids[-4:])):
        expected = direct.embed([begin, *kept]).vectors
        cut = direct.embed(long, truncate_prompt_tokens=5, truncation_side=side)
        np.testing.assert_array_equal(cut.vectors, expected)
        assert cut.token_counts.tolist() == [5]
    short = post(url, "/rerank", {"query": "q", "documents": [long], "max_tokens_per_doc": 5}).json()["results"][0]
    beginning = direct.score("q", direct.detokenize(ids[:5])).scores[0]
    assert short["relevance_score"] == pytest.approx(float(beginning)) and short["document"]["text"] == long


def test_a_client_that_hangs_up_frees_the_engine(direct: Client, url: str) -> None:
    body = {"input": [f"{i} " + "the number of " * 200 for i in range(500)], "truncate_prompt_tokens": -1}

    def open_sequences() -> int:
        engine = json.loads(direct.control("stats"))["engine"]
        return int(engine["load"]["running"]) + int(engine["load"]["waiting"]) if engine is not None else -1

    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    connection.request("POST", "/v1/embeddings", json.dumps(body))
    _until(lambda: open_sequences() > 100)
    connection.close()
    _until(lambda: open_sequences() == 0)


def _until(condition: Any, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
