"""The wire contract: the declared inputs and outputs, and a Triton request without Triton.  No torch, no Triton types.

The tables `INPUTS` and `OUTPUTS` are what the model declares; `docs/wire-contract.md` mirrors
them, and a test compares the two.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from inflight.frontend.errors import RequestError
from inflight.frontend.request.sampling_keys import SAMPLING_KEYS

__all__ = [
    "ADAPTER",
    "INPUTS",
    "OUTPUTS",
    "RETURN_FLAGS",
    "SCHEDULING",
    "TensorSpec",
    "WireRequest",
    "is_foreign",
    "plain_input",
]


class TensorSpec(NamedTuple):
    """A declared tensor: its name, Triton data type and dims (-1 for any length)."""

    name: str
    data_type: str
    dims: tuple[int, ...]


def _specs(data_type: str, dims: tuple[int, ...], *names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, data_type, dims) for name in names)


def _sampling_specs() -> tuple[TensorSpec, ...]:
    typed = {name: key.kind for name, key in SAMPLING_KEYS.items() if key.typed}
    return tuple(TensorSpec(name, kind.data_type, kind.dims) for name, kind in typed.items())


_ONE, _ANY, _TABLE = (1,), (-1,), (-1, -1)

RETURN_FLAGS = (
    "return_finish_reason",
    "return_stop_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_cached_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_prompt_logprobs",
    "return_log_probs",
    "return_lora_digest",
    "return_checkpoint_id",
)
SCHEDULING = ("request_priority", "tenant", "cache_salt")
ADAPTER = ("lora_name", "lora_task_id", "lora_id", "lora_digest")

INPUTS: tuple[TensorSpec, ...] = (
    *_specs("TYPE_STRING", _ONE, "text_input", "messages", "pooling", "embedding_request"),
    *_specs("TYPE_INT64", _ANY, "input_ids"),
    *_specs("TYPE_BOOL", _ONE, "stream"),
    *_specs("TYPE_STRING", _ONE, "sampling_parameters"),
    *_specs("TYPE_BOOL", _ONE, "exclude_input_in_output", *RETURN_FLAGS),
    *_sampling_specs(),
    *_specs("TYPE_INT32", _ONE, "request_priority"),
    *_specs("TYPE_STRING", _ONE, "tenant", "cache_salt", "lora_digest"),
    *_specs("TYPE_INT64", _ANY, "resume_token_ids"),
    *_specs("TYPE_INT32", _ANY, "resume_token_counts"),
    *_specs("TYPE_FP64", _ANY, "resume_cumulative_logprob"),
)

OUTPUTS: tuple[TensorSpec, ...] = (
    *_specs("TYPE_STRING", _ANY, "text_output", "finish_reason", "stop_reason"),
    *_specs("TYPE_FP32", _ANY, "cumulative_logprob"),
    *_specs("TYPE_STRING", _ANY, "logprobs"),
    *_specs("TYPE_UINT32", _ONE, "num_input_tokens", "num_cached_tokens"),
    *_specs("TYPE_UINT32", _ANY, "num_output_tokens"),
    *_specs("TYPE_INT64", _ANY, "token_ids"),
    *_specs("TYPE_UINT32", _ANY, "token_counts"),
    *_specs("TYPE_STRING", _ONE, "prompt_logprobs"),
    *_specs("TYPE_FP32", _ANY, "cum_log_probs"),
    *_specs("TYPE_FP32", _TABLE, "output_log_probs"),
    *_specs("TYPE_INT32", _ONE, "sequence_index", "batch_index"),
    *_specs("TYPE_FP32", _TABLE, "pooled"),
    *_specs("TYPE_INT32", _ANY, "pooled_token_counts"),
    *_specs("TYPE_STRING", _ANY, "labels"),
    *_specs("TYPE_STRING", _ONE, "lora_digest", "checkpoint_id"),
)

# Request parameters that Triton, its clients and proxies add: never sampling keys.  Triton's
# `--http-header-forward-pattern` turns headers into parameters: names with a hyphen, and these.
_HEADERS = {"accept", "authorization", "connection", "cookie", "headers", "host", "origin", "referer", "te"}
_FOREIGN = {"id", "priority", "timeout", "binary_data_output", "binary_data_size", *_HEADERS}
_FOREIGN_PREFIXES = ("sequence_", "triton_", "classification", "traceparent", "tracestate")

_LIST_INPUTS = {spec.name for spec in INPUTS if spec.dims == _ANY}


@dataclass(slots=True)
class WireRequest:
    """A Triton request without Triton.

    Attributes:
        inputs: name -> array as received.
        parameters: request parameters, decoded.
        timeout_us: the request's timeout, in microseconds; 0: none.
        request_id: the client's; "" for none.
        received: `time.monotonic()` seconds; its deadline and its place in the queue count from then.
    """

    inputs: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_us: int = 0
    request_id: str = ""
    received: float = field(default_factory=time.monotonic)


def is_foreign(key: str) -> bool:
    """Whether a request parameter comes from Triton, a client library or a proxy."""
    low = key.lower()
    return low in _FOREIGN or low.startswith(_FOREIGN_PREFIXES) or "-" in low


def plain_input(name: str, array: np.ndarray) -> Any:
    """An input tensor as Python values: a list if the contract says so, else its one element.

    Raises:
        RequestError: INVALID_ARG; an input that is always refused, or that has the wrong number of elements.
    """
    key = SAMPLING_KEYS.get(name)
    if key is not None and key.refusal:  # before its values, which can be millions
        raise RequestError("INVALID_ARG", key.refusal)
    values = array.reshape(-1)
    if values.dtype.kind in "OS":
        plain: list[Any] = [_decoded(name, value) for value in values]
    elif values.dtype in (np.float16, np.float32):
        plain = [float(str(value)) for value in values]  # 0.7, not 0.699999988: as in JSON
    else:
        plain = values.tolist()
    if name in _LIST_INPUTS:
        return plain
    if len(plain) != 1:
        raise RequestError("INVALID_ARG", f"{name} has {len(plain)} elements: give one")
    return plain[0]


def _decoded(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "INVALID_ARG", f"{name} is not valid UTF-8: byte {value[error.start]:#04x} at {error.start}"
        ) from None
