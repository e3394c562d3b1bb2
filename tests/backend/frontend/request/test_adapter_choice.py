"""Requests that choose an adapter, in every form in which clients send its name or number."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from adapter_folders import write_adapter
from frontend_rig import CHECKPOINT, demo_tokenizer

from inflight.adapters.spec import describe_adapter
from inflight.config import EngineConfig
from inflight.engine.pooler_facts import PoolerFacts
from inflight.frontend.adapters.adapter_files import AdapterFiles
from inflight.frontend.adapters.registry import AdapterRegistry
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.request.pooled_prompts import PooledPrompts
from inflight.frontend.request.pooled_request import PooledRequest, PooledRequestReader

TOKENIZER = demo_tokenizer()
CHAT = ChatTemplate.load(str(CHECKPOINT))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> AdapterRegistry:
    root = tmp_path_factory.mktemp("adapters")
    files = AdapterFiles(root / "kept", lambda folder, name: describe_adapter(folder, name, 16))
    made = AdapterRegistry(True, {"doll": "", "sheep": ""})
    for seed, name in enumerate(("doll", "sheep")):
        made.put(files.keep(name, write_adapter(root / name, seed=seed)))
    return made


@pytest.fixture(scope="module")
def parser(registry: AdapterRegistry) -> RequestParser:
    return RequestParser(EngineConfig(model="m"), TOKENIZER, CHAT, 64, 2560, adapters=registry)


def text(value: str) -> np.ndarray:
    return np.array([value.encode()], dtype=np.object_)


def number(value: int) -> np.ndarray:
    return np.array([value], dtype=np.uint64)


def parse(parser: RequestParser, parameters: dict[str, Any] | None = None, **inputs: Any) -> ParsedRequest:
    return parser.parse(WireRequest({"text_input": text("a"), **inputs}, parameters or {}))


def refused(parser: RequestParser, parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(parser, parameters, **inputs)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


@pytest.mark.parametrize(
    ("parameters", "inputs"),
    [
        ({"lora_name": "sheep"}, {}),
        ({}, {"lora_name": text("sheep")}),
        ({}, {"sampling_parameters": text('{"lora_name": "sheep", "temperature": "0"}')}),
        ({"lora_name": "doll"}, {"sampling_parameters": text('{"lora_name": "sheep"}')}),
        ({"lora_name": "doll"}, {"lora_name": text("sheep")}),
        ({"lora_task_id": 2}, {}),
        ({"lora_id": "2"}, {}),
        ({}, {"lora_task_id": number(2)}),
        ({}, {"lora_id": np.array([[2]], dtype=np.uint64)}),
        ({}, {"lora_id": number(2), "lora_name": text("sheep")}),
    ],
)
def test_a_name_or_a_number(
    parser: RequestParser, registry: AdapterRegistry, parameters: dict[str, Any], inputs: dict[str, Any]
) -> None:
    request = parse(parser, parameters, **inputs)
    attached = request.engine_request.attached
    assert attached is not None and attached.adapter is not None and request.adapter is not None
    assert attached.adapter == request.adapter.ref == registry.chosen("sheep", None).ref  # type: ignore[union-attr]


def test_without_one_nothing_is_attached(parser: RequestParser) -> None:
    for parameters in ({}, {"lora_name": None}, {"lora_task_id": None}):
        request = parse(parser, parameters)
        assert (request.engine_request.attached, request.adapter) == (None, None)


def test_refusals(parser: RequestParser) -> None:
    said = "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    assert refused(parser, {"lora_name": "bactrian"}) == said
    assert refused(parser, sampling_parameters=text('{"lora_name": "bactrian"}')) == said
    assert refused(parser, lora_name=text("bactrian")) == said
    assert refused(parser, {"lora_name": "x" * 1025}) == (
        "lora_name has 1025 bytes: at most 1024 are allowed (max_name_bytes in model.json)"
    )
    assert refused(parser, {"lora_name": 5}) == "lora_name=5: must be a string"
    assert refused(parser, {"lora_task_id": -1}).startswith("lora_task_id=-1: no adapter has this number")
    assert refused(parser, {"lora_task_id": 1.5}) == "lora_task_id=1.5: must be an integer"
    assert "give one of them" in refused(parser, {"lora_task_id": 1, "lora_name": "sheep"})
    assert "\\" not in refused(parser, {"lora_name": "../../etc/passwd"})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("lora_weights", np.zeros((2, 3_000_000), dtype=np.float16)),
        ("lora_config", np.zeros((2, 3), dtype=np.int32)),
    ],
)
def test_an_adapter_in_a_request_is_refused_before_its_values_are_read(
    parser: RequestParser, name: str, array: np.ndarray
) -> None:
    parser = RequestParser(EngineConfig(model="m", max_input_bytes=2**30), TOKENIZER, CHAT, 64, 2560)
    said = refused(parser, **{name: array})
    assert said.startswith(f"{name}: a request cannot bring an adapter; let the operator load it (docs/lora.md)")
    assert refused(parser, {"lora_path": "/x"}).startswith("lora_path: a request cannot bring an adapter")


def test_with_lora_off_the_words_are_vllm_backends() -> None:
    off = RequestParser(EngineConfig(model="m"), TOKENIZER, CHAT, 64, 2560)
    for parameters in ({"lora_name": "x"}, {"lora_name": "x" * 5000}, {"lora_task_id": 1}):
        assert refused(off, parameters) == "LoRA feature is not enabled."


def test_a_stream_is_continued_with_the_same_content_alone(parser: RequestParser, registry: AdapterRegistry) -> None:
    ids = registry.ids()
    assert parse(parser, {"lora_name": "doll", "lora_digest": ids["doll"]}).adapter is not None
    said = refused(parser, {"lora_name": "doll"}, lora_digest=text(ids["sheep"]))
    assert said == (
        f"lora_digest='{ids['sheep']}': 'doll' is {ids['doll']} here, so its output cannot be continued; load the same "
        "adapter on all servers, or start the request anew"
    )
    assert "the request names no adapter" in refused(parser, {"lora_digest": ids["doll"]})


def pooled(parser: RequestParser, parameters: dict[str, Any] | None = None, **inputs: Any) -> PooledRequest:
    facts = PoolerFacts(tasks=["embed"], size=8)
    reader = PooledRequestReader(parser, PooledPrompts(facts, TOKENIZER, 64, 2560, 16, 1000), "m")
    asked = json.dumps({"task": "embed", "inputs": ["a", "b"]})
    return reader.read(WireRequest({"pooling": text(asked), **inputs}, parameters or {}))


def test_vectors_have_adapters_too(parser: RequestParser) -> None:
    for parameters, inputs in (
        ({"lora_name": "doll"}, {}),
        ({}, {"lora_name": text("doll")}),
        ({}, {"lora_id": number(1)}),
        ({"lora_task_id": 1}, {}),
    ):
        for member in pooled(parser, parameters, **inputs).members:  # type: ignore[arg-type]
            attached = member.engine_request.attached
            assert attached is not None and attached.adapter is not None and attached.adapter.name == "doll"
            assert member.adapter is not None and attached.pooling is not None
    assert pooled(parser).members[0].adapter is None
    with pytest.raises(RequestError, match="LoRA x is not supported"):
        pooled(parser, {"lora_name": "x"})
