"""Embeddings, scores, rankings and classes with both clients and both protocols, and the commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tritonclient.grpc import service_pb2
from typer.testing import CliRunner

from inflight.frontend.request.contract import INPUTS, OUTPUTS
from inflight_client import (
    AsyncClient,
    Client,
    InvalidRequestError,
    RankedDocument,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    UnavailableError,
)
from inflight_client.pooling import Pooled, embedding_of, pairs_of, pooled_of, ranked
from inflight_client.request import GenerationRequest
from inflight_client.vectors_cli import embed, rerank
from inflight_client.wire import grpc_request, http_body

APP = typer.Typer()
APP.command()(embed)
APP.command()(rerank)


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(APP, arguments, input=stdin)
    return result.exit_code, result.stdout, result.stderr


# -- without a server --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5], [6]]), [[5], [6]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        ([np.array([5]), "a"], [[5], "a"]),
    ],
)
def test_every_form_of_input(given: Any, inputs: list[Any]) -> None:
    assert json.loads(json.dumps(embedding_of(given, {}, None, None))) == {"task": "embed", "inputs": inputs}


def test_a_request_has_only_inputs_of_the_contract() -> None:
    pooling = embedding_of("naïve", {"instruction": "query"}, 2, True)
    options: Any = {"pooling": pooling, "tenant": "t", "cache_salt": "s", "request_priority": 3, "request_id": "r"}
    request = GenerationRequest.build(None, None, None, options, model="m", timeout=None)
    types = {spec.name: spec for spec in INPUTS}
    message = service_pb2.ModelInferRequest.FromString(grpc_request(request, 1.0))
    assert {one.name for one in message.inputs} == {"pooling", "tenant", "cache_salt", "request_priority"} <= set(types)
    assert json.loads(http_body(request, None)["pooling"]) == {
        "task": "embed",
        "inputs": ["naïve"],
        "dimensions": 2,
        "normalize": True,
        "instruction": "query",
    }
    assert not request.stream and {"pooled", "pooled_token_counts", "labels"} <= {spec.name for spec in OUTPUTS}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"pooling": {"task": "embed", "inputs": ["a"]}, "max_tokens": 5}, ValueError, "max_tokens: only for text"),
        ({"pooling": {"task": "embed", "inputs": ["\ud800"]}}, ValueError, r"inputs\[0\] contains an unpaired"),
        ({"pooling": {"task": "score", "inputs": [["a", 5.5]]}}, TypeError, r"inputs\[0\] must be a string"),
    ],
)
def test_a_wrong_request_is_refused_before_it_is_sent(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        GenerationRequest.build(None, None, None, options, model="m", timeout=None)
    with pytest.raises(ValueError, match="exactly one of prompt, messages, input_ids and pooling"):
        GenerationRequest.build("a", None, None, options, model="m", timeout=None)


def test_texts_that_make_no_pairs() -> None:
    assert pairs_of("q", ["a", "b"]) == [("q", "a"), ("q", "b")] and pairs_of(["a"], "b") == [("a", "b")]
    for first, second in ((["a", "b"], "c"), (["a", "b"], ["c"]), ("a", []), ([], "a"), (["a", "b"], ["c"] * 3)):
        with pytest.raises(ValueError, match="cannot be paired"):
            pairs_of(first, second)


def test_documents_are_sorted_and_equal_ones_keep_their_order() -> None:
    scores = np.array([0.5, 0.75, 0.5, -1.0], np.float32)
    assert [one.index for one in ranked(list("abcd"), scores, None)] == [1, 0, 2, 3]
    assert ranked(list("abcd"), scores, 1) == [RankedDocument(1, "b", 0.75)]


@pytest.mark.parametrize(
    "columns",
    [
        {"pooled": [1.0, 2.0, 3.0], "pooled_token_counts": [1, 1]},
        {"pooled": [1.0, 2.0], "pooled_token_counts": [1]},
        {"pooled": [], "pooled_token_counts": [1, 1]},
        {"pooled": [1.0, 2.0]},
    ],
)
def test_outputs_that_do_not_fit_are_the_servers_error(columns: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="for 2 inputs"):
        pooled_of(columns, 2)
    found = pooled_of({"pooled": [1.0, 2.0], "pooled_token_counts": [1, 1]}, 2)
    assert isinstance(found, Pooled) and found.vectors.shape == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["embed"], "give at least one text"),
        (["rerank", "q"], "give at least one document"),
        (["embed", "--file", "/nowhere"], "cannot read /nowhere"),
        (["embed", "-"], "give at least one text"),
    ],
)
def test_commands_without_texts(arguments: list[str], says: str) -> None:
    status, _, error = run(*arguments, stdin="\n\n")
    assert status == 2 and error.startswith(f"inflight: {says}")


# -- with the scripted server ------------------------------------------------------------------------


def test_arrays_come_back(client: Client) -> None:
    found = client.embed(["naïve", [5, 6]], tenant="t", timeout=20)
    np.testing.assert_array_equal(found.vectors, np.array([[5, 0.5], [2, 0.5]], np.float32))
    assert found.vectors.dtype == np.float32 and found.token_counts.tolist() == [5, 2]
    scores = client.score("q", ["abc", "d"])
    assert scores.scores.tolist() == pytest.approx([0.03, 0.01]) and scores.token_counts.tolist() == [4, 2]
    assert [one.document for one in client.rerank("q", ["a", "abc", "ab"], top_n=2)] == ["abc", "ab"]
    assert [one.document for one in client.rerank("q", "abc")] == ["abc"]
    assert [one.document for one in client.rerank("q", (text for text in ("a", "ab")))] == ["ab", "a"]  # type: ignore[arg-type]
    for top_n in (0, -1):
        with pytest.raises(ValueError, match=f"top_n={top_n}: must be at least 1"):
            client.rerank("q", ["a", "abc"], top_n=top_n)
    classes = client.classify(["g", "b"])
    assert classes.labels == ["bad", "good"] and classes.best == ["good", "bad"]
    assert classes.probabilities.tolist() == [[0.25, 0.75], [0.75, 0.25]]
    one = client.embed("a")
    assert one.vectors.shape == (1, 2)
    assert client.score("q", "a").scores.shape == (1,), "a single number comes as a scalar over HTTP"


async def test_arrays_come_back_in_asyncio(address: str, protocol: Any) -> None:
    async with AsyncClient(address, protocol=protocol, model="scripted") as client:
        assert (await client.embed("abc")).vectors.tolist() == [[3, 0.5]]
        assert (await client.score("q", "abc")).scores.tolist() == pytest.approx([0.03])
        assert [one.index for one in await client.rerank("q", ["a", "abc"])] == [1, 0]
        assert (await client.classify("g")).best == ["good"]
        with pytest.raises(TypeError, match="unknown option 'max_tokens'"):
            await client.embed("a", max_tokens=5)  # type: ignore[call-arg]


def test_errors_and_retries(client: Client, key: str, seen: Callable[..., dict[str, Any]]) -> None:
    refused = json.dumps(
        {"code": "INVALID_ARG", "error": "inputs[0]: an empty text: at least one character is expected"}
    )
    with pytest.raises(InvalidRequestError, match=r"inputs\[0\]"):
        client.embed(refused)
    busy = {"key": key, "fail_times": 2, "code": "UNAVAILABLE", "error": "the queue is full: 1 sequences are open"}
    assert client.embed(json.dumps(busy)).vectors.shape == (1, 2)
    assert seen(key)["requests"] == 3
    client.retries = RetryPolicy(max_attempts=1)
    with pytest.raises(UnavailableError):
        client.embed(json.dumps({**busy, "key": key + "2"}))


def test_a_request_for_vectors_is_cancelled(
    client: Client, protocol: str, key: str, seen: Callable[..., dict[str, Any]]
) -> None:
    text = json.dumps({"key": key, "first_after": 20})
    stream = client.stream(pooling={"task": "embed", "inputs": [text]})
    threading.Thread(target=lambda: (seen(key, lambda report: report.get("running") == 1), stream.cancel())).start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    if protocol == "grpc":  # Triton notices a closed HTTP connection only when it writes to it
        assert seen(key, lambda report: report["cancelled"] == 1)["finished"] == 0


def test_commands(address: str, protocol: str, tmp_path: Path) -> None:
    server = ["--url", address, "--protocol", protocol, "--model", "scripted"]
    file = tmp_path / "texts"
    file.write_text("four\r\n\nünf\n")
    assert run("embed", "a", "-", "--file", str(file), *server, stdin="bc\n") == (
        0,
        "1 0.5\n2 0.5\n4 0.5\n3 0.5\n",
        "",
    )
    status, out, _ = run("embed", "ü", "--json", *server)
    assert status == 0 and json.loads(out) == {"text": "ü", "embedding": [1.0, 0.5], "tokens": 1}
    file.write_text("x\n" * 300)
    status, out, _ = run("embed", "--file", str(file), *server)
    assert status == 0 and out == "1 0.5\n" * 300, "more than one request"
    assert run("rerank", "q", "a", "abc", "--top-n", "1", *server) == (0, "0.030000\tabc\n", "")
    status, out, _ = run("rerank", "q", "a", "--json", *server)
    assert json.loads(out) == {"index": 0, "score": pytest.approx(0.01), "document": "a"}
