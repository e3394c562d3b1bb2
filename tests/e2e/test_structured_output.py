"""Structured output through a real tritonserver, from every kind of client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from inflight_client import Client, InvalidRequestError
from inflight_tools.launcher import TritonServer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo", "Rome"]},
        "degrees": {"type": "integer", "minimum": -40, "maximum": 50},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["city", "degrees", "words"],
    "additionalProperties": False,
}
COMPACT = {"disable_any_whitespace": True}
ANSWERS = 200


@pytest.fixture(scope="module", params=["grpc", "http"])
def client(server: TritonServer, request: pytest.FixtureRequest) -> Any:
    address = server.grpc_address if request.param == "grpc" else server.http_address
    with Client(address, protocol=request.param, model="demo") as client:
        yield client


def test_every_answer_validates_beside_others(client: Client) -> None:
    def ask(number: int) -> str:
        options: dict[str, Any] = dict(seed=number, max_tokens=120, temperature=1.0)
        if number % 4 == 3:
            return client.generate(f"def f{number}(", **options).text
        result = client.generate(f"city {number}: ", json_schema=SCHEMA, n=2, structured_outputs=COMPACT, **options)
        for choice in result.choices:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.text), SCHEMA)
                stopped.append(choice.text)
        return result.text

    stopped: list[str] = []
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(84)))
    assert len(stopped) >= ANSWERS / 2  # of each of two protocols
    for number in (3, 11, 5):
        assert ask(number) == together[number], "neighbours with a grammar change nothing, and none changes it"


def test_kinds_and_errors(client: Client) -> None:
    def ask(**keys: Any) -> str:
        return client.generate("x", max_tokens=60, seed=1, structured_outputs=keys).text

    assert ask(choice=["left", "right"]) in ("left", "right")
    assert len(ask(regex="[0-9]{4}")) == 4
    assert isinstance(
        json.loads(ask(json=json.dumps({"type": "array", "maxItems": 1, "items": {"type": "null"}}))), list
    )
    assert ask(grammar='root ::= "a" ("b" | "c")') in ("ab", "ac")
    tag = {"format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</n>"}}
    assert ask(structural_tag=json.dumps(tag)).startswith("<n>")
    with pytest.raises(InvalidRequestError, match="look-around"):
        ask(regex="(?=a)b")
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        ask(json={"type": "array", "uniqueItems": True})
    with pytest.raises(InvalidRequestError, match="unknown key 'jsn'"):
        ask(jsn={})


def test_tensorrt_llms_inputs(server: TritonServer) -> None:
    import numpy as np
    import tritonclient.http as triton

    def tensor(name: str, text: str) -> triton.InferInput:
        made = triton.InferInput(name, [1], "BYTES")
        made.set_data_from_numpy(np.array([text], dtype=np.object_))
        return made

    body = {
        "text_input": "x",
        "exclude_input_in_output": True,
        "max_tokens": 30,
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "(yes|no)",
    }
    import httpx2

    answer = httpx2.post(f"http://{server.http_address}/v2/models/demo/generate", json=body).json()
    assert answer["text_output"] in ("yes", "no")
