"""Questions about a model: what is sent, and what an answer may be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from inflight_client import Client, InvalidRequestError, ServerError
from inflight_client.questions import control_question, detokenize_question, json_answer, tokenize_question
from inflight_client.wire import grpc_control, http_control

CHAT = [{"role": "user", "content": "x"}]


def sent(question: Any) -> dict[str, Any]:
    """The parts that both protocols send, as one dict."""
    message = service_pb2.ModelInferRequest.FromString(grpc_control("m", question))
    parameters = {key: value.bool_param or value.string_param for key, value in message.parameters.items()}
    assert parameters.pop("triton_enable_empty_final_response") is True
    body = http_control(question)
    assert {**parameters, **{tensor.name: body[tensor.name] for tensor in message.inputs}} == body
    return body


def test_what_is_sent() -> None:
    assert sent(control_question("stats")) == {"control": "stats"}
    assert sent(control_question("stats", "k")) == {"control": "stats", "admin_key": "k"}
    with pytest.raises(ValueError, match=r"lora_name: 'x\\x00y' contains a NUL, which no parameter can"):
        control_question("load_adapter", "k", {"load_inplace": True, "lora_name": "x\0y"})
    assert sent(tokenize_question("a", None, {}, None, False)) == {"control": "tokenize", "text_input": "a"}
    body = sent(tokenize_question(None, CHAT, {"tools": None, "add_generation_prompt": False}, True, True))
    assert json.loads(body.pop("messages")) == {"messages": CHAT, "add_generation_prompt": False}
    assert body == {"control": "tokenize", "add_special_tokens": True, "return_token_strs": True}
    assert json.loads(sent(tokenize_question(None, CHAT, {}, None, False))["messages"]) == CHAT
    assert sent(tokenize_question("a", None, {}, None, False, -1))["truncate_prompt_tokens"] == "-1"
    assert http_control(tokenize_question("a", None, {}, False, False))["add_special_tokens"] is False
    assert sent(detokenize_question(np.array([1, 2]))) == {"control": "detokenize", "input_ids": [1, 2]}
    message = service_pb2.ModelInferRequest.FromString(grpc_control("m", tokenize_question("é", None, {}, None, False)))
    assert message.raw_input_contents[0] == b"\2\0\0\0\xc3\xa9"


def test_what_is_wrong_is_refused_before_anything_is_sent() -> None:
    for arguments, error, match in [
        ((None, None, {}), ValueError, "give exactly one of prompt and messages, not none"),
        (("a", CHAT, {}), ValueError, "not prompt and messages"),
        (("a", None, {"tools": []}), ValueError, "tools: only for messages"),
        (("a\udcff", None, {}), ValueError, "unpaired surrogate"),
        ((5, None, {}), TypeError, "prompt must be a string"),
        ((None, "hello", {}), TypeError, "messages must be a list"),
        ((None, CHAT, {"tool": []}), TypeError, "unknown option 'tool'; allowed are tools, chat_template_kwargs"),
    ]:
        with pytest.raises(error, match=match):
            tokenize_question(*arguments, None, False)


@pytest.mark.parametrize("ids", [[1.5], ["a"], [2**63]])
def test_token_ids_are_integers(ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        detokenize_question(ids)


@pytest.mark.parametrize("text", ["", "[1]", "nope"])
def test_an_answer_is_a_json_object(text: str) -> None:
    with pytest.raises(ServerError, match="not a JSON object"):
        json_answer(text)


def test_a_model_of_another_backend(client: Client) -> None:
    with pytest.raises(ServerError, match="not a JSON object: 'answer to model'"):
        client.model_info()
    with pytest.raises(InvalidRequestError):
        client.model_info("none")
