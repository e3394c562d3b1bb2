"""The client's side of the wire contract: requests to bytes, responses to chunks.  No I/O.

Both protocols yield `Columns`: output name -> list with one element per sequence (or token); `pooled` can be an array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from inflight_client.errors import InflightError, ServerError, code_of_message, error_for
from inflight_client.questions import Question
from inflight_client.request import GenerationRequest, messages_json
from inflight_client.results import ChoiceDelta, Logprob, StreamChunk, TokenLogprobs

__all__ = [
    "Columns",
    "chunk_of",
    "control_answer",
    "decoder_of",
    "grpc_columns",
    "grpc_control",
    "grpc_request",
    "http_body",
    "http_columns",
    "http_control",
    "http_error",
    "token_logprob_sums",
]

Columns = dict[str, Any]

_ZERO, _NONE, _NULL = (0,), (None,), ("null",)
_TRUE = b"\x01"
_UNFINISHED = ("", "None", None)  # vllm_backend writes str(None) while a sequence runs
_NUMBERS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f", "FP64": "d"}
# Codes of Triton's HTTP frontend; 400 may be INVALID_ARG, CANCELLED or UNKNOWN.
_HTTP_CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE"}


def _fields(request: GenerationRequest) -> Iterator[tuple[str, str, Any]]:
    """Input tensors as (name, Triton data type, value); lists where there can be several elements."""
    if request.pooling is not None:
        yield "pooling", "BYTES", json.dumps(request.pooling, ensure_ascii=False)
        yield from _scheduling_fields(request)
        return
    if request.prompt is not None:
        yield "text_input", "BYTES", request.prompt
    if request.messages is not None:
        yield "messages", "BYTES", messages_json(request.messages, request.chat)
    if request.input_ids is not None:
        yield "input_ids", "INT64", request.input_ids
    yield "stream", "BOOL", request.stream
    yield "exclude_input_in_output", "BOOL", True
    yield "sampling_parameters", "BYTES", json.dumps(request.sampling)
    yield "return_finish_reason", "BOOL", True
    # The number of ids is known, unless the server truncates them.
    if request.input_ids is None or request.sampling.get("truncate_prompt_tokens") is not None:
        yield "return_num_input_tokens", "BOOL", True
    if request.return_stop_reason:
        yield "return_stop_reason", "BOOL", True
    if request.return_num_cached_tokens:
        yield "return_num_cached_tokens", "BOOL", True
    # The token ids imply their number, so one of the two outputs is enough.
    yield ("return_token_ids" if request.return_token_ids else "return_num_output_tokens"), "BOOL", True
    if request.sampling.get("logprobs") is not None:
        yield "return_logprobs", "BOOL", True
    if request.return_cumulative_logprob:
        yield "return_cumulative_logprob", "BOOL", True
    yield from _scheduling_fields(request)
    if request.return_log_probs:
        yield "return_log_probs", "BOOL", True
    if request.return_checkpoint_id:
        yield "return_checkpoint_id", "BOOL", True
    if request.resume_token_ids is not None:
        yield "resume_token_ids", "INT64", [i for ids in request.resume_token_ids for i in ids or []]
        yield "resume_token_counts", "INT32", [-1 if ids is None else len(ids) for ids in request.resume_token_ids]
    if request.resume_cumulative_logprob is not None:
        yield "resume_cumulative_logprob", "FP64", request.resume_cumulative_logprob


def _scheduling_fields(request: GenerationRequest) -> Iterator[tuple[str, str, Any]]:
    if request.request_priority is not None:
        yield "request_priority", "INT32", request.request_priority
    if request.tenant is not None:
        yield "tenant", "BYTES", request.tenant
    if request.cache_salt is not None:
        yield "cache_salt", "BYTES", request.cache_salt
    if request.adapter is not None:
        yield "lora_name", "BYTES", request.adapter
    if request.return_adapter_digest:
        yield "return_lora_digest", "BOOL", True
    if request.adapter_digest is not None:
        yield "lora_digest", "BYTES", request.adapter_digest


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))  # 0 would mean no deadline


def grpc_request(request: GenerationRequest, timeout: float | None) -> bytes:
    """The message of a streaming inference, a serialised `ModelInferRequest`.

    Args:
        timeout: seconds until the deadline; None for no deadline.

    Raises:
        ValueError: an integer out of the range of its data type.
    """
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    if timeout is not None:
        message.parameters["timeout"].int64_param = _microseconds(timeout)
    for header, value in request.trace_headers.items():  # for servers that trace without Triton
        message.parameters[header].string_param = value
    return _with_inputs(message, _fields(request))


def _with_inputs(message: service_pb2.ModelInferRequest, fields: Iterable[tuple[str, str, Any]]) -> bytes:
    """The serialised message with input tensors.

    Most requests have tensors of the same names, types and shapes; their descriptions are serialised once.  The bytes
    of two messages, one after the other, are those of the merged message.
    """
    tensors, contents = [], []
    for name, datatype, value in fields:
        values = value if isinstance(value, list) else (value,)
        tensors.append((name, datatype, len(values)))
        contents.append(_TRUE if value is True else _raw(name, datatype, values))
    message.raw_input_contents.extend(contents)
    serialised: bytes = message.SerializeToString()
    return serialised + _descriptions(tuple(tensors))


@lru_cache(maxsize=128)
def _descriptions(tensors: tuple[tuple[str, str, int], ...]) -> bytes:
    """The part of a serialised message that describes its tensors, given as (name, Triton data type, elements)."""
    message = service_pb2.ModelInferRequest()
    for name, datatype, count in tensors:
        message.inputs.add(name=name, datatype=datatype, shape=[count])
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    serialised: bytes = message.SerializeToString()
    return serialised


def _raw(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        encoded = values[0].encode("utf-8")
        return struct.pack("<I", len(encoded)) + encoded
    try:
        return struct.pack(f"<{len(values)}{_NUMBERS[datatype]}", *values)
    except struct.error:
        raise ValueError(f"{name}: must be integers within the range of {datatype}") from None


def grpc_control(model: str, question: Question) -> bytes:
    """The message of a question, a serialised `ModelInferRequest`."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for key, parameter in question.parameters.items():
        if isinstance(parameter, bool):
            message.parameters[key].bool_param = parameter
        else:
            message.parameters[key].string_param = parameter
    return _with_inputs(message, question.inputs)


def control_answer(responses: list[Columns]) -> str:
    """The text that answers a request with the parameter `control`.

    Raises:
        ServerError: not exactly one response, or one without text.
    """
    texts = [text for columns in responses for text in columns.get("text_output", [])]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ServerError(f"the server answered a control request with {len(texts)} texts; expected one")
    return texts[0]


def http_control(question: Question) -> dict[str, Any]:
    """The JSON object of a question to `/generate`."""
    return {**question.parameters, **{name: value for name, _, value in question.inputs}}


def http_body(request: GenerationRequest, timeout: float | None) -> dict[str, Any]:
    """The JSON object of `/generate_stream`; `timeout` as in `grpc_request`."""
    body = {name: value for name, _, value in _fields(request)}
    body["id"] = request.request_id
    if timeout is not None:
        body["timeout"] = _microseconds(timeout)
    return body | request.trace_headers


def grpc_columns(response: service_pb2.ModelStreamInferResponse) -> Columns:
    """The outputs of a streamed response.

    Raises:
        InflightError: the response is an error.
    """
    if response.error_message:
        raise error_for(code_of_message(response.error_message), response.error_message)
    inner = response.infer_response
    columns: Columns = {}
    for output, raw in zip(inner.outputs, inner.raw_output_contents):
        decode = decoder_of(output.name, output.datatype)
        if decode is not None:
            columns[output.name] = decode(raw)
    return columns


def _texts(raw: bytes) -> list[str]:
    """Strings, each after its length in four bytes."""
    texts, place = [], 0
    while place < len(raw):
        start = place + 4
        place = start + int.from_bytes(raw[place:start], "little")
        texts.append(raw[start:place].decode("utf-8"))
    return texts


def _numbers(code: str) -> Callable[[bytes], list[Any]]:
    """A decoder of little-endian numbers; `code` as in the module `struct`.  Ten times faster than numpy for one."""
    return lambda raw: memoryview(raw).cast(code).tolist()  # type: ignore[call-overload, no-any-return]


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "BYTES": _texts,
    **{datatype: _numbers(code) for datatype, code in _NUMBERS.items()},
}


def decoder_of(name: str, datatype: str) -> Callable[[bytes], Any] | None:
    """The decoder of the contents of an output; None for a type that no output of the contract has."""
    if name == "pooled":  # up to millions of numbers
        return _array
    return _DECODERS.get(datatype)


def _array(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype="<f4")


def http_columns(event: str) -> Columns:
    """The outputs of a server-sent event; Triton writes a single element as a scalar, several as a list.

    Raises:
        InflightError: the event is an error, or not a JSON object.
    """
    try:
        values = json.loads(event)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ServerError(f"the server sent an event that is not a JSON object: {event[:200]!r}")
    if "error" in values:
        message = str(values["error"])
        raise error_for(code_of_message(message), message)
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def http_error(status: int, body: str) -> InflightError:
    """The error of a response with a status other than 200; its body is JSON or a server-sent event."""
    try:
        message = str(json.loads(body.strip().removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {status}: {body.strip()[:200] or 'no body'}"
    # The status is only a fallback: for a model's error tritonserver 24.10 reads the code after freeing it,
    # and there is no status for a deadline or a cancellation.
    return error_for(code_of_message(message, default=_HTTP_CODES.get(status, "UNKNOWN")), message)


def chunk_of(columns: Columns, n: int) -> StreamChunk | None:
    """The outputs as a chunk; None for a response without outputs (an empty final one).

    Raises:
        ServerError: inconsistent outputs.
    """
    texts = columns.get("text_output")
    if texts is None:
        return None
    count = len(texts)
    if count > n:
        raise ServerError(f"the server sent {count} sequences, but {n} were requested")
    prompt, cached = columns.get("prompt_logprobs"), columns.get("num_cached_tokens")
    num_input_tokens, checkpoint = columns.get("num_input_tokens"), columns.get("checkpoint_id")
    return StreamChunk(
        [_only_delta(columns, texts[0])] if count == 1 else _deltas(columns, texts),
        num_input_tokens[0] if num_input_tokens else None,
        cached[0] if cached else None,
        _logprobs(prompt[0]) if prompt else None,
        checkpoint_id=checkpoint[0] if checkpoint else None,
    )


def _only_delta(columns: Columns, text: str) -> ChoiceDelta:
    """`_deltas` for one sequence, the usual case, in a fifth of the time."""
    ids = columns.get("token_ids")
    tokens = columns.get("num_output_tokens", _ZERO) if ids is None else columns.get("token_counts", (len(ids),))
    reasons = columns.get("finish_reason", _NONE)
    logprobs = columns.get("logprobs", _NONE)
    cumulative = columns.get("cumulative_logprob", _NONE)
    stops = columns.get("stop_reason", _NULL)
    if not len(tokens) == len(reasons) == len(logprobs) == len(cumulative) == len(stops) == 1:
        raise _inconsistent(columns)
    (count,), (reason,), (entries,) = tokens, reasons, logprobs
    if ids is None:
        ids = []
    elif len(ids) != count:
        raise _inconsistent(columns)
    return ChoiceDelta(
        0,
        text,
        ids,
        count,
        None if reason in _UNFINISHED else reason,
        None if entries is None else _logprobs(entries),
        cumulative[0],
        None if stops is _NULL else json.loads(stops[0]),
    )


def _deltas(columns: Columns, texts: list[str]) -> list[ChoiceDelta]:
    count = len(texts)
    ids = _split_ids(columns, count)
    tokens = [len(some) for some in ids] if "token_ids" in columns else columns.get("num_output_tokens", [0] * count)
    reasons = columns.get("finish_reason", [None] * count)
    logprobs = columns.get("logprobs", [None] * count)
    cumulative = columns.get("cumulative_logprob", [None] * count)
    stops = columns.get("stop_reason", _NULL * count)
    if not len(tokens) == len(reasons) == len(logprobs) == len(cumulative) == len(stops) == count:
        raise _inconsistent(columns)
    return [
        ChoiceDelta(
            index=index,
            text=texts[index],
            token_ids=ids[index],
            num_tokens=tokens[index],
            finish_reason=None if reasons[index] in _UNFINISHED else reasons[index],
            logprobs=_logprobs(logprobs[index]),
            cumulative_logprob=cumulative[index],
            stop_reason=json.loads(stops[index]),
        )
        for index in range(count)
    ]


def _inconsistent(columns: Columns) -> ServerError:
    lengths = {name: len(values) for name, values in columns.items()}
    return ServerError(f"the server sent outputs of lengths that do not fit each other: {lengths}")


def _split_ids(columns: Columns, count: int) -> list[list[int]]:
    """Split `token_ids`, the concatenated sequences, by `token_counts`."""
    ids: list[int] = columns.get("token_ids", [])
    counts: list[int] = columns.get("token_counts", [len(ids)] if count == 1 else [0] * count)
    if len(counts) != count or sum(counts) != len(ids):
        raise ServerError(f"the server sent {len(ids)} token ids for token_counts={counts} of {count} sequences")
    split, start = [], 0
    for some in counts:
        split.append(ids[start : start + some])
        start += some
    return split


def token_logprob_sums(columns: Columns, counts: list[int]) -> list[float]:
    """Sums over the `counts` new tokens of each sequence; zeros if log probabilities were not requested."""
    table = columns.get("output_log_probs")
    if not table:
        return [0.0] * len(counts)
    width = len(table) // len(counts)  # rows are padded to the longest
    return [sum(table[row * width : row * width + count]) for row, count in enumerate(counts)]


def _logprobs(text: str | None) -> list[TokenLogprobs] | None:
    rows: list[Mapping[str, Mapping[str, Any]] | None] | None = json.loads(text) if text else None
    if rows is None:
        return None
    return [
        {
            int(token_id): Logprob(entry["logprob"], entry.get("rank"), entry.get("decoded_token"))
            for token_id, entry in row.items()
        }
        if row
        else None
        for row in rows
    ]
