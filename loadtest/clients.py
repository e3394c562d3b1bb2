"""Sends and times a request, over gRPC streaming, `/generate_stream` or OpenAI's `/v1/completions`.

All clients work with and without gevent's monkey patching.  The streaming calls of `tritonclient` pass
responses to a callback on a thread of the client object; here every request is a call of its own, so a
user is a plain loop.  The same clients serve Inflight and the baseline: the model's configuration (a batch
dimension, decoupled responses) determines shapes and streaming.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.errors import LoadTestError

__all__ = ["Exchange", "GrpcClient", "LoadClient", "OpenAIClient", "SseClient", "connect"]

_PROBE_SECONDS = 5.0
_MAX_MESSAGE = 64 * 2**20


@dataclass
class Exchange:
    """The outcome of a request.

    Attributes:
        start: `time.time()` when it was sent.
        arrivals: (seconds after `start`, new tokens) of every response with tokens.
        latency: seconds to its last token, or to its failure.
        error: why it failed; None if the answer is complete.
    """

    start: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    latency: float = 0.0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; for a model that answers in one response, its whole latency."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def itl(self) -> list[float]:
        """Seconds between one response with tokens and the next."""
        times = [at for at, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first response; None if there was only one."""
        later = sum(count for _, count in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None


class LoadClient(Protocol):
    """The interface of all clients."""

    def check(self) -> None:
        """Raise LoadTestError unless server and model are ready."""

    def send(self, prompt: list[int] | str, max_tokens: int) -> Exchange:
        """Send a greedy request that ignores the end of sequence; failures of the server end up in the result."""


def connect(protocol: str, address: str, model: str) -> LoadClient:
    """A client for protocol "grpc", "http" or "openai"; it connects on first use."""
    address = address.split("://", 1)[-1].rstrip("/")
    kinds: dict[str, Callable[[str, str], LoadClient]] = {"grpc": GrpcClient, "http": SseClient, "openai": OpenAIClient}
    return kinds[protocol](address, model)


def _inputs(prompt: list[int] | str, max_tokens: int, stream: bool) -> Iterator[tuple[str, str, Any]]:
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


class _Timed:
    """Performs the exchange and turns a failure into its `error`."""

    def send(self, prompt: list[int] | str, max_tokens: int) -> Exchange:
        begun = time.perf_counter()
        exchange = Exchange(time.time())
        responses = self._responses(prompt, max_tokens)
        try:
            for tokens in responses:
                if tokens:
                    exchange.arrivals.append((time.perf_counter() - begun, tokens))
                if exchange.tokens >= max_tokens:
                    # Triton can close the stream of an answered request seconds later, when it is busy with the
                    # next batch, so the user does not wait.  Triton would cancel a stream that is not read.
                    threading.Thread(target=_drain, args=(responses,), daemon=True).start()
                    break
        except _Failed as error:
            exchange.error = str(error)
        exchange.latency = time.perf_counter() - begun
        if exchange.error is None and exchange.tokens != max_tokens:
            exchange.error = f"{exchange.tokens} tokens arrived, but {max_tokens} were requested"
        return exchange

    def _responses(self, prompt: list[int] | str, max_tokens: int) -> Iterator[int]:
        raise NotImplementedError


class _Failed(Exception):
    pass


def _drain(responses: Iterator[int]) -> None:
    with contextlib.suppress(_Failed):
        for _ in responses:
            pass


def _unreachable(address: str, protocol: str, reason: str) -> LoadTestError:
    return LoadTestError(
        f"cannot reach {address} by {protocol} ({reason}); start a server there or correct the address"
    )


def _no_model(model: str, address: str) -> LoadTestError:
    return LoadTestError(f"model {model!r} is not ready on {address}; load it there or choose another model")


_PACK = {"INT64": "q", "INT32": "i", "FP32": "f", "BOOL": "?"}


class GrpcClient(_Timed):
    """`ModelStreamInfer`: one bidirectional stream per request on one channel."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model
        limits = [("grpc.max_receive_message_length", _MAX_MESSAGE), ("grpc.max_send_message_length", _MAX_MESSAGE)]
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(address, options=limits))
        self._batched = self._streams = False

    def check(self) -> None:
        try:
            self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=_PROBE_SECONDS)
            ready = self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._model), timeout=_PROBE_SECONDS)
            if not ready.ready:
                raise _no_model(self._model, self._address)
            request = service_pb2.ModelConfigRequest(name=self._model)
            config = self._stub.ModelConfig(request, timeout=_PROBE_SECONDS).config
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise _unreachable(self._address, "gRPC", error.code().name) from None
            raise _no_model(self._model, self._address) from None
        self._batched, self._streams = config.max_batch_size > 0, config.model_transaction_policy.decoupled

    def _responses(self, prompt: list[int] | str, max_tokens: int) -> Iterator[int]:
        message = service_pb2.ModelInferRequest(model_name=self._model)
        for name, datatype, value in _inputs(prompt, max_tokens, self._streams):
            values = value if isinstance(value, list) else [value]
            shape = [1, len(values)] if self._batched else [len(values)]
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(_raw(datatype, values))
        try:
            for response in self._stub.ModelStreamInfer(iter((message,))):
                if response.error_message:
                    raise _Failed(response.error_message)
                yield _num_tokens(response.infer_response)
        except grpc.RpcError as error:
            raise _Failed(f"gRPC {error.code().name}: {error.details()}") from None


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


class _HttpClient(_Timed):
    """One POST per request, server-sent events back, each on a connection of its own."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=_PROBE_SECONDS)
        try:
            connection.request("GET", path, headers=self._headers())
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._address, "HTTP", str(error) or type(error).__name__) from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        return {}

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of the answer's events."""
        connection = http.client.HTTPConnection(self._address)
        try:
            headers = {"Content-Type": "application/json", **self._headers()}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}: {response.read().decode(errors='replace').strip()}")
            while line := response.readline():
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise _Failed(str(event["error"]))
                    yield event
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise _Failed(f"HTTP: {type(error).__name__}: {error}") from None
        finally:
            connection.close()


class SseClient(_HttpClient):
    """`/v2/models/<model>/generate_stream`."""

    _streams = False

    def check(self) -> None:
        if self._get("/v2/health/ready")[0] != 200:
            raise _unreachable(self._address, "HTTP", "not ready")
        if self._get(f"/v2/models/{self._model}/ready")[0] != 200:
            raise _no_model(self._model, self._address)
        config = json.loads(self._get(f"/v2/models/{self._model}/config")[1])
        self._streams = bool(config.get("model_transaction_policy", {}).get("decoupled"))

    def _responses(self, prompt: list[int] | str, max_tokens: int) -> Iterator[int]:
        body = {name: value for name, _, value in _inputs(prompt, max_tokens, self._streams)}
        for event in self._events(f"/v2/models/{self._model}/generate_stream", body):
            yield event.get("num_output_tokens", 0)


class OpenAIClient(_HttpClient):
    """`/v1/completions` of a gateway; the environment variable OPENAI_API_KEY is its key."""

    def check(self) -> None:
        status, answer = self._get("/v1/models")  # a router in front of gateways has no page for each model
        if status == 401:
            raise LoadTestError(f"{self._address} asks for an API key; set the environment variable OPENAI_API_KEY")
        if status != 200:
            raise _unreachable(self._address, "HTTP", f"{status}: {answer.decode(errors='replace').strip()}")
        if self._model not in [model["id"] for model in json.loads(answer)["data"]]:
            raise _no_model(self._model, self._address)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _responses(self, prompt: list[int] | str, max_tokens: int) -> Iterator[int]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        before = 0
        for event in self._events("/v1/completions", body):
            # A router can drop `continuous_usage_stats`: then a text counts as a token, until the end tells.
            has_text = any(choice["text"] for choice in event["choices"])
            now = event["usage"]["completion_tokens"] if event.get("usage") else before + has_text
            yield now - before
            before = now
