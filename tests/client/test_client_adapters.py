"""Adapters in the client: what is sent, and a stream that another server continues."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import service_pb2
from typer.testing import CliRunner

from inflight_client import InvalidRequestError, RetryPolicy, ServerUnreachableError
from inflight_client.endpoints import Endpoints
from inflight_client.pooling import embedding_of
from inflight_client.questions import control_question
from inflight_client.request import GenerationRequest
from inflight_client.stream import Stream
from inflight_client.wire import grpc_control, grpc_request, http_body
from inflight_tools import cli

DOLL, OTHER = "a" * 32, "b" * 32
FAST = RetryPolicy(initial_delay=0.0, max_delay=0.0)


def build(**options: Any) -> GenerationRequest:
    return GenerationRequest.build("p", None, None, options, model="m", timeout=None)  # type: ignore[arg-type]


def inputs(request: GenerationRequest) -> dict[str, bytes]:
    message = service_pb2.ModelInferRequest.FromString(grpc_request(request, None))
    return {each.name: raw for each, raw in zip(message.inputs, message.raw_input_contents)}


def test_the_name_is_an_input() -> None:
    assert inputs(build(adapter="doll"))["lora_name"] == b"\x04\0\0\0doll"
    assert http_body(build(adapter="doll"), None)["lora_name"] == "doll"
    assert not [name for name in inputs(build()) if "lora" in name]
    for wrong in (5, b"doll"):
        with pytest.raises(TypeError, match="adapter must be a string"):
            build(adapter=wrong)
    with pytest.raises(ValueError, match="surrogate"):
        build(adapter="\ud800")


def test_vectors_have_adapters_too() -> None:
    options: dict[str, Any] = {"adapter": "doll"}
    pooling = embedding_of("a", options, None, None)
    request = GenerationRequest.build(None, None, None, {"pooling": pooling, **options}, model="m", timeout=None)  # type: ignore[arg-type,typeddict-item]
    assert inputs(request)["lora_name"] == b"\x04\0\0\0doll"


def test_parameters_of_a_question() -> None:
    question = control_question("load_adapter", "key", {"lora_name": "doll", "load_inplace": True})
    parameters = service_pb2.ModelInferRequest.FromString(grpc_control("m", question)).parameters
    assert parameters["lora_name"].string_param == "doll" and parameters["load_inplace"].bool_param is True
    assert (parameters["control"].string_param, parameters["admin_key"].string_param) == ("load_adapter", "key")


class TwoServers:
    """The first breaks off after two tokens; each has an adapter of that name, of some content."""

    def __init__(self, *digests: str) -> None:
        self.digests = digests
        self.endpoints = Endpoints(len(digests))
        self.requests: list[GenerationRequest] = []

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> Any:
        self.requests.append(request)
        return self._responses(len(self.requests) == 1, request, self.digests[index])

    def _responses(self, breaks: bool, request: GenerationRequest, digest: str) -> Any:
        servers = self

        class Call:
            def __init__(self) -> None:
                self.items = servers._items(breaks, request, digest)

            def __next__(self) -> Any:
                return next(self.items)

            def cancel(self) -> None: ...
            def close(self) -> None: ...

        return Call()

    def _items(self, breaks: bool, request: GenerationRequest, digest: str) -> Any:
        if request.adapter_digest not in (None, digest):
            raise InvalidRequestError(f"lora_digest={request.adapter_digest!r}: 'doll' is {digest} here")
        given = sum(len(ids or ()) for ids in request.resume_token_ids or [])
        for token in range(given, 4):
            if breaks and token == 2:
                raise ServerUnreachableError("gone")
            columns: dict[str, Any] = {
                "text_output": [f"<{token}>"],
                "token_ids": [token],
                "token_counts": [1],
                "finish_reason": ["length" if token == 3 else "None"],
            }
            yield columns | ({"lora_digest": [digest]} if request.return_adapter_digest else {})

    def address(self, index: int) -> str:
        return f"server-{index}"

    def responds(self, index: int, model: str) -> bool:
        return True

    def watch(self, stream: Stream) -> None: ...


def test_a_server_with_the_same_content_continues() -> None:
    servers = TwoServers(DOLL, DOLL)
    stream = Stream(build(adapter="doll"), FAST, servers)
    assert "".join(chunk.text for chunk in stream) == "<0><1><2><3>"
    first, second = servers.requests
    assert (first.return_adapter_digest, first.adapter_digest) == (True, None)
    assert (second.adapter, second.adapter_digest, second.resume_token_ids) == ("doll", DOLL, [[0, 1]])


def test_another_content_of_the_same_name_is_refused() -> None:
    stream = Stream(build(adapter="doll"), FAST, TwoServers(DOLL, OTHER))
    got = []
    with pytest.raises(InvalidRequestError, match=f"'doll' is {OTHER} here"):
        got += [chunk.text for chunk in stream]
    assert stream.result().text == "<0><1>"


def test_without_an_adapter_no_content_is_asked_for() -> None:
    servers = TwoServers(DOLL, OTHER)
    assert len(list(Stream(build(), FAST, servers))) == 4
    assert not any(request.return_adapter_digest or request.adapter_digest for request in servers.requests)


@pytest.mark.parametrize("command", [["generate", "a"], ["chat"], ["embed", "a"], ["rerank", "a", "b"]])
def test_the_commands_have_the_option(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [command[0], "--help"], env={"COLUMNS": "200"})
    assert "--adapter" in result.output
