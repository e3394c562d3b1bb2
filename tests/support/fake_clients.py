"""Clients of the model `fake`, whose engine echoes the prompt: tritonclient's stream, and HTTP."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from typing import Any

import fake_engine
import numpy as np
import tritonclient.grpc as grpcclient
from frontend_rig import demo_tokenizer

from inflight_tools.launcher import TritonServer

__all__ = [
    "BACKEND_ERROR",
    "ECHO",
    "PROMPT",
    "TOKENIZER",
    "Grpc",
    "events",
    "flags",
    "generate",
    "joined",
    "post",
    "scrape",
    "slow",
    "tensor",
    "text",
]

TOKENIZER = demo_tokenizer()
PROMPT = "the list of names"
ECHO = TOKENIZER.decode(fake_engine.echo(TOKENIZER.encode(PROMPT), 16))
BACKEND_ERROR = 400  # what Triton 24.10's `generate` returns for any error of a backend
NUMPY = {"BYTES": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}


def tensor(name: str, values: Any, datatype: str) -> grpcclient.InferInput:
    array = np.array(values, dtype=NUMPY[datatype])
    found = grpcclient.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


def text(value: str | bytes = PROMPT) -> grpcclient.InferInput:
    return tensor("text_input", [value.encode() if isinstance(value, str) else value], "BYTES")


def flags(*names: str) -> list[grpcclient.InferInput]:
    return [tensor(name, [True], "BOOL") for name in names]


class Grpc:
    """One bidirectional stream; responses by request id."""

    def __init__(self, server: TritonServer, model: str = "fake") -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc_address)
        self.model = model
        self.queues: dict[str, queue.Queue[Any]] = {}
        self.stray: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(self._take)

    def _take(self, result: Any, error: Any) -> None:
        key = result.get_response().id if result is not None else None
        self.queues.get(key, self.stray).put(result if error is None else error)

    def send(self, *inputs: grpcclient.InferInput, request_id: str = "r", **options: Any) -> None:
        self.queues.setdefault(request_id, queue.Queue())
        options.setdefault("enable_empty_final_response", True)
        self.client.async_stream_infer(self.model, list(inputs), request_id=request_id, **options)

    def take(self, request_id: str = "r") -> list[Any]:
        """All responses to a request; exactly one, the last with data, has the FINAL flag."""
        found = []
        while True:
            response = self.queues[request_id].get(timeout=30)
            assert not isinstance(response, Exception)
            found.append(response)
            if response.get_response().parameters["triton_final_response"].bool_param:
                break
        assert all(response.as_numpy("text_output") is not None for response in found)
        return found

    def error(self) -> str:
        return self.stray.get(timeout=30).message()

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def joined(responses: list[Any]) -> str:
    return "".join(response.as_numpy("text_output")[0].decode() for response in responses)


def post(server: TritonServer, endpoint: str, body: Any, model: str = "fake") -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http_address}/v2/models/{model}/{endpoint}", data=data)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server: TritonServer, **body: Any) -> dict[str, Any]:
    status, answer = post(server, "generate", {"text_input": PROMPT, **body})
    assert status == 200, answer
    return json.loads(answer)


def events(answer: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]


def scrape(server: TritonServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


def slow(tokens: int = 1500, delay: float = 0.01) -> dict[str, Any]:
    return {"parameters": {"tenant": f"delay={delay}", "max_tokens": tokens}}
