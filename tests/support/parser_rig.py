"""Requests as Triton passes them, parsed with the demo model's tokenizer and template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontend_rig import CHECKPOINT, demo_tokenizer

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import INPUTS, WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import RequestParser

__all__ = [
    "CHAT",
    "MAX_LEN",
    "PARSER",
    "SPECS",
    "TOKENIZER",
    "VOCAB",
    "parse",
    "parse_with",
    "parser",
    "rejected",
    "sampled",
    "sent",
    "tensor",
]

TOKENIZER = demo_tokenizer()
CHAT = ChatTemplate.load(str(CHECKPOINT))
VOCAB = 2560
MAX_LEN = 64


def parser(**config: Any) -> RequestParser:
    return RequestParser(EngineConfig(model="m", **config), TOKENIZER, CHAT, MAX_LEN, VOCAB)


PARSER = parser()

DTYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}
SPECS = {spec.name: spec for spec in INPUTS}


def tensor(name: str, value: Any) -> np.ndarray:
    """A declared input as Triton passes it."""
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array(values, dtype=DTYPES[SPECS[name].data_type])


def parse(parameters: dict[str, Any] | None = None, timeout_us: int = 0, **inputs: Any) -> ParsedRequest:
    inputs.setdefault("text_input", "the list")
    arrays = {name: tensor(name, value) for name, value in inputs.items() if value is not None}
    return PARSER.parse(WireRequest(arrays, parameters or {}, timeout_us))


def sent(parameters: dict[str, Any] | None = None, **inputs: Any) -> AddRequest:
    """The message for the engine."""
    return parse(parameters, **inputs).engine_request


def sampled(parameters: dict[str, Any] | None = None, **inputs: Any) -> SamplingParams:
    return sent(parameters, **inputs).params


def rejected(parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(parameters, **inputs)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


# -- keys of vLLM beyond the common ones -------------------------------------------------------


def parse_with(config: dict[str, Any], parameters: dict[str, Any] | None = None, **inputs: Any) -> ParsedRequest:
    """As `parse`, by a parser with other options of `model.json`."""
    inputs.setdefault("text_input", "the list")
    arrays = {name: tensor(name, value) for name, value in inputs.items() if value is not None}
    return parser(**config).parse(WireRequest(arrays, parameters or {}))
