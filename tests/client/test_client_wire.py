"""Requests to bytes and JSON, responses to chunks."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from inflight.frontend.request.contract import INPUTS
from inflight_client import InvalidRequestError, Logprob, ServerError, UnavailableError
from inflight_client.request import GenerationRequest
from inflight_client.wire import chunk_of, grpc_columns, grpc_request, http_body, http_columns, http_error

FULL = GenerationRequest(
    model="m",
    prompt="héllo",
    sampling={"max_tokens": 5, "stop": ["\n"], "logprobs": 2},
    request_id="r",
    request_priority=-3,
    tenant="t",
    cache_salt="s",
    return_cumulative_logprob=True,
)


def sent(request: GenerationRequest, timeout: float | None) -> service_pb2.ModelInferRequest:
    """The message as the server reads it."""
    return service_pb2.ModelInferRequest.FromString(grpc_request(request, timeout))


def inputs_of(message: service_pb2.ModelInferRequest) -> dict[str, Any]:
    """Input tensors as the server reads them."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            array = deserialize_bytes_tensor(raw)
        else:
            array = np.frombuffer(raw, dtype=triton_to_np_dtype(tensor.datatype))
        assert list(tensor.shape) == [len(array)]
        values[tensor.name] = array.tolist()
    return values


def test_a_grpc_request_follows_the_contract() -> None:
    message = sent(FULL, timeout=1.5)
    values = inputs_of(message)
    assert values.pop("text_input") == ["héllo".encode()]
    assert json.loads(values.pop("sampling_parameters")[0]) == FULL.sampling
    assert values == {
        "stream": [True],
        "exclude_input_in_output": [True],
        "return_finish_reason": [True],
        "return_num_input_tokens": [True],
        "return_token_ids": [True],
        "return_logprobs": [True],
        "return_cumulative_logprob": [True],
        "request_priority": [-3],
        "tenant": [b"t"],
        "cache_salt": [b"s"],
    }
    assert (message.model_name, message.id) == ("m", "r")
    assert message.parameters["timeout"].int64_param == 1_500_000
    assert message.parameters["triton_enable_empty_final_response"].bool_param


@pytest.mark.parametrize(
    "request_",
    [
        FULL,
        GenerationRequest(model="m", input_ids=[1, 2], return_token_ids=False),
        GenerationRequest(model="m", messages=[{"role": "user", "content": "hi"}]),
    ],
)
def test_requests_use_only_inputs_that_the_backend_declares(request_: GenerationRequest) -> None:
    declared = {
        spec.name: (spec.data_type.removeprefix("TYPE_").replace("STRING", "BYTES"), spec.dims) for spec in INPUTS
    }
    for tensor in sent(request_, None).inputs:
        datatype, dims = declared[tensor.name]
        assert tensor.datatype == datatype
        assert dims == (-1,) or tuple(tensor.shape) == dims
    assert http_body(request_, None).keys() - {"id"} <= declared.keys()


def test_http_body_is_flat_json() -> None:
    body = json.loads(json.dumps(http_body(FULL, timeout=0.25)))
    assert json.loads(body["sampling_parameters"]) == FULL.sampling
    assert (body["text_input"], body["stream"], body["timeout"], body["id"]) == ("héllo", True, 250_000, "r")
    assert body["request_priority"] == -3
    assert http_body(GenerationRequest(model="m", input_ids=[5]), None)["input_ids"] == [5]


def test_descriptions_that_are_kept_are_those_of_equal_tensors() -> None:
    for ids in ([1, 2], [3, 4], [5, 6, 7], [8]):
        for priority in (None, 2):
            request = GenerationRequest(model="m", input_ids=ids, request_priority=priority)
            values = inputs_of(sent(request, None))
            assert values["input_ids"] == ids and values.get("request_priority", [None]) == [priority]


def test_trace_context_goes_as_request_parameters() -> None:
    headers = {"traceparent": "00-ab-cd-01", "tracestate": "k=v"}
    traced = GenerationRequest(model="m", prompt="p", trace_headers=headers)
    parameters = sent(traced, None).parameters
    assert {name: parameters[name].string_param for name in headers} == headers
    assert http_body(traced, None).items() >= headers.items()
    assert not {*headers} & {*sent(FULL, None).parameters} and not {*headers} & {*http_body(FULL, None)}


def test_without_token_ids_the_counts_are_requested() -> None:
    body = http_body(GenerationRequest(model="m", prompt="p", return_token_ids=False), None)
    assert body["return_num_output_tokens"] is True
    assert "return_token_ids" not in body and "timeout" not in body


@pytest.mark.parametrize("flag", ["return_num_cached_tokens", "return_stop_reason", "return_checkpoint_id"])
def test_flags_of_newer_releases_are_sent_only_if_asked_for(flag: str) -> None:
    """A server of an older release lacks these inputs."""
    plain, asking = (GenerationRequest(model="m", prompt="p", **asks) for asks in ({}, {flag: True}))  # type: ignore[arg-type]
    assert flag not in http_body(plain, None)
    assert http_body(asking, None)[flag] is True
    assert inputs_of(sent(asking, None))[flag] == [True]


def test_messages_go_as_a_list_and_with_options_as_an_object() -> None:
    chat = [{"role": "user", "content": "x"}]
    plain, rich = (
        GenerationRequest(model="m", messages=chat, chat=options) for options in ({}, {"add_generation_prompt": False})
    )
    assert json.loads(http_body(plain, None)["messages"]) == chat
    assert json.loads(http_body(rich, None)["messages"]) == {"messages": chat, "add_generation_prompt": False}
    assert inputs_of(sent(rich, None))["messages"][0].decode() == http_body(rich, None)["messages"]


def test_a_timeout_is_never_rounded_to_none() -> None:
    assert sent(FULL, timeout=1e-9).parameters["timeout"].int64_param == 1


def test_an_integer_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"request_priority.*INT32"):
        sent(GenerationRequest(model="m", prompt="p", request_priority=2**40), None)


def response(final: bool = False, **outputs: np.ndarray | list[str]) -> service_pb2.ModelStreamInferResponse:
    message = service_pb2.ModelStreamInferResponse()
    inner = message.infer_response
    for name, values in outputs.items():
        if isinstance(values, np.ndarray):
            datatype, raw = (
                {"int64": "INT64", "uint32": "UINT32", "float32": "FP32"}[str(values.dtype)],
                values.tobytes(),
            )
        else:
            encoded = [value.encode() for value in values]
            datatype, raw = "BYTES", b"".join(struct.pack("<I", len(value)) + value for value in encoded)
        inner.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        inner.raw_output_contents.append(raw)
    inner.parameters["triton_final_response"].bool_param = final
    return message


@given(st.lists(st.tuples(st.text(), st.lists(st.integers(0, 2**40), max_size=4)), min_size=1, max_size=4))
def test_sequences_are_separated_over_both_protocols(sequences: list[tuple[str, list[int]]]) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text, _ in sequences]
    ids = [some for _, some in sequences]
    flat, counts = [i for some in ids for i in some], [len(some) for some in ids]
    over_grpc = grpc_columns(
        response(
            text_output=texts,
            finish_reason=["None"] * len(texts),
            token_ids=np.array(flat, dtype=np.int64),
            token_counts=np.array(counts, dtype=np.uint32),
        )
    )
    # Triton writes a list of one element as that element.
    columns = {"text_output": texts, "finish_reason": ["None"] * len(texts), "token_ids": flat, "token_counts": counts}
    event = {name: values[0] if len(values) == 1 else values for name, values in columns.items()}
    for decoded in (over_grpc, http_columns(json.dumps(event))):
        chunk = chunk_of(decoded, len(texts))
        assert chunk is not None
        assert [delta.text for delta in chunk.choices] == texts
        assert [delta.token_ids for delta in chunk.choices] == ids
        assert [delta.num_tokens for delta in chunk.choices] == counts
        assert all(delta.finish_reason is None for delta in chunk.choices)


def test_all_outputs_are_typed() -> None:
    entry = [{"11": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}, "5": {"logprob": -2.0, "rank": 2}}]
    chunk = chunk_of(
        grpc_columns(
            response(
                text_output=["a"],
                finish_reason=["stop"],
                stop_reason=['"a"'],
                token_ids=np.array([11], dtype=np.int64),
                num_input_tokens=np.array([3], dtype=np.uint32),
                num_cached_tokens=np.array([2], dtype=np.uint32),
                cumulative_logprob=np.array([-0.25], dtype=np.float32),
                logprobs=[json.dumps(entry)],
                prompt_logprobs=[json.dumps([None, *entry])],
                checkpoint_id=["c0ffee"],
            )
        ),
        1,
    )
    assert chunk is not None
    delta = chunk.choices[0]
    logprobs = {11: Logprob(-0.25, 1, "a"), 5: Logprob(-2.0, 2, None)}
    assert chunk.num_cached_tokens == 2 and chunk.checkpoint_id == "c0ffee"
    assert (chunk.num_input_tokens, delta.finish_reason, delta.cumulative_logprob) == (3, "stop", -0.25)
    assert delta.logprobs == [logprobs] and delta.stop_reason == "a"
    assert chunk.prompt_logprobs == [None, logprobs]


def test_counts_without_ids() -> None:
    chunk = chunk_of({"text_output": ["a", "b"], "num_output_tokens": [2, 1]}, 2)
    assert chunk is not None
    assert [delta.num_tokens for delta in chunk.choices] == [2, 1]
    assert [delta.token_ids for delta in chunk.choices] == [[], []]


def test_an_empty_final_response_is_not_a_chunk() -> None:
    assert chunk_of(grpc_columns(response(final=True)), 1) is None


def test_inconsistent_outputs_are_an_error() -> None:
    for columns, n in [
        ({"text_output": ["a", "b"]}, 1),
        ({"text_output": ["a"], "finish_reason": ["stop", "stop"]}, 1),
        ({"text_output": ["a"], "stop_reason": ["null", "null"]}, 1),
        ({"text_output": ["a", "b"], "token_ids": [1, 2, 3], "token_counts": [1, 1]}, 2),
        ({"text_output": ["a", "b"], "token_ids": [1, 2]}, 2),
    ]:
        with pytest.raises(ServerError):
            chunk_of(columns, n)


def test_errors_in_responses_are_raised() -> None:
    message = "the queue is full: 3 sequences are open and 2 are allowed; try again later"
    with pytest.raises(UnavailableError, match="3 sequences"):
        grpc_columns(service_pb2.ModelStreamInferResponse(error_message=message))
    with pytest.raises(UnavailableError, match="3 sequences"):
        http_columns(json.dumps({"error": message}))
    with pytest.raises(ServerError, match="not a JSON object"):
        http_columns("<html>")


def test_http_errors() -> None:
    for status, body, kind, code in [
        (404, '{"error":"x"}', InvalidRequestError, "NOT_FOUND"),
        (503, '{"error":"x"}', UnavailableError, "UNAVAILABLE"),
        (500, 'data: {"error":"x"}\n\n', ServerError, "INTERNAL"),
        (400, 'data: {"error":"temperature=-1 is out of range"}\n\n', InvalidRequestError, "INVALID_ARGUMENT"),
        (400, '{"error":"the queue is full"}', UnavailableError, "UNAVAILABLE"),
        (503, "<html>Service down</html>", UnavailableError, "UNAVAILABLE"),
        (502, "", ServerError, "UNKNOWN"),
    ]:
        error = http_error(status, body)
        assert type(error) is kind
        assert error.code == code
