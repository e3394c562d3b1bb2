"""Streams answers from Triton, over gRPC or `/generate_stream`.

The streaming calls of `tritonclient` pass responses to a callback on a thread of the client object; here every request
is a call of its own, so a user is a plain loop.  The same clients serve Inflight and the baseline: the model's
configuration (a batch dimension, decoupled responses) determines shapes and streaming.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.exchange import Exchange, Failure, TimedClient, no_model, unreachable
from loadtest.http_client import HttpClient

__all__ = ["GrpcClient", "SseClient"]

_PROBE_SECONDS = 5.0
_MAX_MESSAGE = 64 * 2**20


def _inputs(prompt: list[int] | str, max_tokens: int, stream: bool, adapter: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(prompt, str):
        yield "text_input", "BYTES", prompt
    else:
        yield "input_ids", "INT64", prompt
    if stream:
        yield "stream", "BOOL", True
    yield "exclude_input_in_output", "BOOL", True
    yield "return_num_output_tokens", "BOOL", True
    yield "max_tokens", "INT32", max_tokens
    yield "temperature", "FP32", 0.0
    yield "ignore_eos", "BOOL", True
    if adapter:
        yield "lora_name", "BYTES", adapter


_PACK = {"INT64": "q", "INT32": "i", "FP32": "f", "BOOL": "?"}


class GrpcClient(TimedClient):
    """`ModelStreamInfer`: one bidirectional stream per request on one channel."""

    def __init__(self, address: str, model: str, traits: dict[str, Any] | None = None) -> None:
        address = address.split("://", 1)[-1].rstrip("/")
        self._address, self._model = address, model
        limits = [("grpc.max_receive_message_length", _MAX_MESSAGE), ("grpc.max_send_message_length", _MAX_MESSAGE)]
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(address, options=limits))
        self.traits = traits or {}

    def models(self) -> list[str]:
        """The names of the models that are ready."""
        try:
            index = self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            raise unreachable(self._address, "gRPC", f"its list of models: {error.code().name}") from None
        return [model.name for model in index.models]

    def check(self) -> None:
        try:
            self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=_PROBE_SECONDS)
            ready = self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._model), timeout=_PROBE_SECONDS)
            if not ready.ready:
                raise no_model(self._model, self._address)
            request = service_pb2.ModelConfigRequest(name=self._model)
            config = self._stub.ModelConfig(request, timeout=_PROBE_SECONDS).config
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise unreachable(self._address, "gRPC", error.code().name) from None
            raise no_model(self._model, self._address) from None
        streams = config.model_transaction_policy.decoupled
        self.traits = {"batched": config.max_batch_size > 0, "streams": streams}

    def _responses(self, prompt: list[int] | str, max_tokens: int, adapter: str, exchange: Exchange) -> Iterator[int]:
        message = service_pb2.ModelInferRequest(model_name=self._model)
        for name, datatype, value in _inputs(prompt, max_tokens, self.traits["streams"], adapter):
            values = value if isinstance(value, list) else [value]
            shape = [1, len(values)] if self.traits["batched"] else [len(values)]
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(_raw(datatype, values))
        try:
            for response in self._stub.ModelStreamInfer(iter((message,))):
                if response.error_message:
                    raise Failure("an error in the stream", response.error_message)
                yield _num_tokens(response.infer_response)
        except grpc.RpcError as error:
            raise Failure(f"gRPC {error.code().name}", error.details() or "") from None


def _raw(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        encoded = values[0].encode()
        return struct.pack("<I", len(encoded)) + encoded
    return struct.pack(f"<{len(values)}{_PACK[datatype]}", *values)


def _num_tokens(response: Any) -> int:
    for output, raw in zip(response.outputs, response.raw_output_contents):
        if output.name == "num_output_tokens":
            return sum(struct.unpack(f"<{len(raw) // 4}I", raw))
    return 0


class SseClient(HttpClient):
    """`/v2/models/<model>/generate_stream`."""

    def __init__(self, address: str, model: str, traits: dict[str, Any] | None = None) -> None:
        super().__init__(address, model)
        self.traits = traits or {}

    def models(self) -> list[str]:
        """The names of the models that are ready."""
        status, answer = self._ask("/v2/repository/index", {"ready": True})
        if status != 200:
            raise unreachable(self._address, "HTTP", f"its list of models: {status}")
        return [model["name"] for model in json.loads(answer)]

    def check(self) -> None:
        if self._ask("/v2/health/ready")[0] != 200:
            raise unreachable(self._address, "HTTP", "not ready")
        if self._ask(f"/v2/models/{self._model}/ready")[0] != 200:
            raise no_model(self._model, self._address)
        config = json.loads(self._ask(f"/v2/models/{self._model}/config")[1])
        self.traits = {"streams": bool(config.get("model_transaction_policy", {}).get("decoupled"))}

    def _responses(self, prompt: list[int] | str, max_tokens: int, adapter: str, exchange: Exchange) -> Iterator[int]:
        body = {name: value for name, _, value in _inputs(prompt, max_tokens, self.traits["streams"], adapter)}
        for event in self._events(f"/v2/models/{self._model}/generate_stream", body):
            yield event.get("num_output_tokens", 0)
