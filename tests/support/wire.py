"""Helpers on plain tritonclient for end-to-end tests: the code of users without our client package."""

from __future__ import annotations

import contextlib
import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

_KINDS: dict[str, tuple[str, Any]] = {
    "input_ids": ("INT64", np.int64),
    "stream": ("BOOL", bool),
    "exclude_input_in_output": ("BOOL", bool),
    "request_priority": ("INT32", np.int32),
}


def tensor(name: str, value: Any) -> grpc.InferInput:
    """An input tensor: strings and dicts (as JSON) are BYTES, `return_*` are BOOL."""
    kind, dtype = _KINDS.get(name, ("BOOL", bool) if name.startswith("return_") else ("BYTES", object))
    values = value if isinstance(value, list) else [value]
    if kind == "BYTES":
        values = [json.dumps(v) if isinstance(v, dict) else v for v in values]
        values = [v if isinstance(v, bytes) else v.encode() for v in values]
    array = np.array(values, dtype=dtype)
    result = grpc.InferInput(name, array.shape, kind)
    result.set_data_from_numpy(array)
    return result


@dataclass
class Responses:
    """All responses to one request, in order."""

    chunks: list[dict[str, np.ndarray]] = field(default_factory=list)
    finals: int = 0
    error: InferenceServerException | None = None

    @property
    def text(self) -> str:
        return b"".join(chunk["text_output"][0] for chunk in self.chunks).decode()

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk["token_ids"]]

    def sequence(self, index: int) -> list[int]:
        """Token ids of one of n sequences: `token_counts` divides `token_ids`."""
        tokens: list[int] = []
        for chunk in self.chunks:
            ends = np.cumsum(chunk["token_counts"])
            tokens += chunk["token_ids"][ends[index] - chunk["token_counts"][index] : ends[index]].tolist()
        return tokens


class GrpcStream:
    """One bidirectional gRPC stream; responses are collected by request id."""

    def __init__(self, address: str, model: str) -> None:
        self.client = grpc.InferenceServerClient(address)
        self.model = model
        self.answers: dict[str, Responses] = {}
        self.events: queue.Queue[str] = queue.Queue()
        self.client.start_stream(self._receive)

    def send(self, request_id: str, *, timeout: int | None = None, **inputs: Any) -> None:
        """`timeout` in microseconds."""
        self.answers[request_id] = Responses()
        tensors = [tensor(name, value) for name, value in inputs.items()]
        self.client.async_stream_infer(
            self.model, tensors, request_id=request_id, enable_empty_final_response=True, timeout=timeout
        )

    def _receive(self, result: grpc.InferResult | None, error: InferenceServerException | None) -> None:
        if error is not None:
            # tritonclient does not say which request of a stream an error is about.
            open_ids = [key for key, answer in self.answers.items() if not answer.finals and answer.error is None]
            for request_id in open_ids[:1]:
                self.answers[request_id].error = error
                self.events.put(request_id)
            return
        response = result.get_response()
        answer = self.answers[response.id]
        if response.outputs:
            answer.chunks.append({out.name: result.as_numpy(out.name) for out in response.outputs})
        answer.finals += response.parameters["triton_final_response"].bool_param
        self.events.put(response.id)

    def wait(self, *request_ids: str, timeout: float = 60.0) -> None:
        """Wait until each of these requests has its final response or an error."""
        while not all(self.answers[r].finals or self.answers[r].error for r in request_ids):
            self.events.get(timeout=timeout)

    def has_chunks(self, request_id: str, count: int, seconds: float) -> bool:
        """Whether so many responses, or the end, arrive within these seconds."""
        with contextlib.suppress(queue.Empty):
            self.wait_chunks(request_id, count, seconds)
            return True
        return False

    def wait_chunks(self, request_id: str, count: int, timeout: float = 60.0) -> None:
        """Wait for so many responses, or for the end: a busy server puts several tokens into one."""
        answer = self.answers[request_id]
        while len(answer.chunks) < count and not (answer.finals or answer.error):
            self.events.get(timeout=timeout)

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:.0f} s"
        time.sleep(0.01)
    return value


def post(url: str, body: dict[str, Any] | bytes, timeout: float = 60.0) -> tuple[int, str]:
    """POST JSON; returns (status, body) for any status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def server_sent_events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[5:]) for line in body.splitlines() if line.startswith("data:")]


def gauges(metrics_address: str, model: str) -> dict[str, float]:
    """Samples of `/metrics` with this model's label, summed over versions."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model") == model and "le" not in sample.labels:
                # The parser adds `_total` to a counter without it.
                name = sample.name if f"{sample.name}{{" in text else sample.name.removesuffix("_total")
                found[name] = found.get(name, 0.0) + sample.value
    return found
