"""The wire contract: Triton request -> `ParsedRequest`.  No torch, no Triton types.

The tables `INPUTS` and `OUTPUTS` are what the model declares; `docs/wire-contract.md` mirrors
them, and a test compares the two.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.generation_config import generation_defaults
from inflight.frontend.request.limits import LimitError, Limits
from inflight.frontend.request.prompts import PROMPTS, PromptReader
from inflight.frontend.request.resume import RESUME_INPUTS, Ended, read_resumed
from inflight.frontend.request.sampling_keys import (
    CUMULATIVE,
    FINAL_ONLY,
    RequestKeys,
    request_keys,
    to_bool,
    to_float,
    to_int,
    to_text,
)
from inflight.frontend.request.tenant import tenant_of
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "ParsedRequest",
    "RequestParser",
    "TensorSpec",
    "WireRequest",
    "field_of",
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


_ONE, _ANY, _TABLE = (1,), (-1,), (-1, -1)

RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_cached_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_prompt_logprobs",
    "return_log_probs",
)
_SCHEDULING = ("request_priority", "tenant", "cache_salt")

INPUTS: tuple[TensorSpec, ...] = (
    *_specs("TYPE_STRING", _ONE, "text_input", "messages"),
    *_specs("TYPE_INT64", _ANY, "input_ids"),
    *_specs("TYPE_BOOL", _ONE, "stream"),
    *_specs("TYPE_STRING", _ONE, "sampling_parameters"),
    *_specs("TYPE_BOOL", _ONE, "exclude_input_in_output", *RETURN_FLAGS),
    *_specs("TYPE_INT32", _ONE, "max_tokens", "max_completion_tokens", "min_tokens", "min_length", "n", "top_k"),
    *_specs("TYPE_FP32", _ONE, "temperature", "top_p", "min_p"),
    *_specs("TYPE_FP32", _ONE, "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_specs("TYPE_UINT64", _ONE, "random_seed"),
    *_specs("TYPE_INT64", _ONE, "seed"),
    *_specs("TYPE_STRING", _ANY, "stop", "stop_words", "bad_words"),
    *_specs("TYPE_INT64", _ANY, "stop_token_ids"),
    *_specs("TYPE_BOOL", _ONE, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *_specs("TYPE_STRING", _ONE, "guided_decoding_guide_type", "guided_decoding_guide"),
    *_specs("TYPE_INT32", _ONE, "end_id", "pad_id", "beam_width", "num_return_sequences"),
    *_specs("TYPE_FP32", _ONE, "length_penalty"),
    *_specs("TYPE_BOOL", _ONE, "return_context_logits", "return_generation_logits"),
    *_specs("TYPE_INT32", _ONE, "request_priority"),
    *_specs("TYPE_STRING", _ONE, "tenant", "cache_salt"),
    *_specs("TYPE_INT64", _ANY, "resume_token_ids"),
    *_specs("TYPE_INT32", _ANY, "resume_token_counts"),
    *_specs("TYPE_FP64", _ANY, "resume_cumulative_logprob"),
)

OUTPUTS: tuple[TensorSpec, ...] = (
    *_specs("TYPE_STRING", _ANY, "text_output", "finish_reason"),
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
)

# Request parameters that Triton, its clients and proxies add: never sampling keys.  Triton's
# `--http-header-forward-pattern` turns headers into parameters: names with a hyphen, and these.
_HEADERS = {"accept", "authorization", "connection", "cookie", "headers", "host", "origin", "referer", "te"}
_FOREIGN = {"id", "priority", "timeout", "binary_data_output", "binary_data_size", *_HEADERS}
_FOREIGN_PREFIXES = ("sequence_", "triton_", "classification", "traceparent", "tracestate")

_SAMPLING_INPUTS = {spec.name for spec in INPUTS} - {
    *PROMPTS,
    *_SCHEDULING,
    *RETURN_FLAGS,
    *RESUME_INPUTS,
    "stream",
    "exclude_input_in_output",
    "sampling_parameters",
}
_LIST_INPUTS = {spec.name for spec in INPUTS if spec.dims == _ANY}
_INT32 = (-(2**31), 2**31 - 1)


@dataclass(slots=True)
class WireRequest:
    """A Triton request without Triton.

    Attributes:
        inputs: name -> array as received.
        parameters: request parameters, decoded.
        timeout_us: the timeout that Triton has for the request, in microseconds; 0 for none.
        request_id: the client's name for it; "" for none.
        received: `time.monotonic()` seconds; its deadline and its place in line count from then.
    """

    inputs: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_us: int = 0
    request_id: str = ""
    received: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class ParsedRequest:
    """A checked request: the message for the engine, and what only the frontend needs.

    A new field for the engine goes into `AddRequest`, and into the parser that fills it.

    Attributes:
        engine_request: crosses the pipe as it is; its `request_id` is 0 until `with_id`.
        stream: one response per new text, else one at the end.
        prepend_text: what the first text of each sequence begins with ("" or the prompt).
        returns: names of the `return_*` flags that are set.
        shows_logprobs: the client requested `logprobs` itself.
        timeout: seconds from arrival to the deadline; None for none.
        cumulative_logprobs: sums over `engine_request.output_token_ids`, one per sequence; empty for 0.
        ends: how sequences ended with the last of their `output_token_ids`, None for the others; empty: none did.
        cumulative: each response repeats what the ones before it contained.
        separate: each response is about one sequence, as TensorRT-LLM's are.
        name: the client's, for the log; "" for none.
    """

    engine_request: AddRequest
    stream: bool = False
    prepend_text: str = ""
    returns: frozenset[str] = frozenset()
    shows_logprobs: bool = False
    timeout: float | None = None
    cumulative_logprobs: list[float] = field(default_factory=list)
    ends: list[Ended | None] = field(default_factory=list)
    cumulative: bool = False
    separate: bool = False
    name: str = ""

    def with_id(self, request_id: int) -> ParsedRequest:
        """The same request under an id of the engine's."""
        return replace(self, engine_request=msgspec.structs.replace(self.engine_request, request_id=request_id))


class RequestParser:
    """Checks and converts what clients send; the frontend checks nothing after it.

    Args:
        config: engine options (`default_max_tokens`, `exclude_input_in_output`, `seed`, `wire_format`, and the limits).
        max_model_len, vocab_size, eos_token_ids: of the loaded checkpoint.
        number: of this frontend, among those that share the engine: their seeds differ.

    Attributes:
        prompts, limits: what it reads prompts and checks sizes with.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        number: int = 0,
    ) -> None:
        self._config = config
        self._header = config.tenant_header
        self._tokenizer = tokenizer
        self.prompts = PromptReader(tokenizer, chat, max_model_len, vocab_size)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self.limits = Limits(config, vocab_size)
        self._defaults = {} if config.generation_config is None else generation_defaults(config)
        self._is_tensorrt_llm = config.wire_format == "tensorrt_llm"
        self._seeds = random.Random(config.seed + number) if config.seed is not None else random.SystemRandom()

    def parse(self, wire: WireRequest) -> ParsedRequest:
        """Raises RequestError (INVALID_ARG) with what came and what is allowed."""
        try:
            return self._parse(wire)
        except (TokenizerError, LimitError) as error:
            raise RequestError("INVALID_ARG", str(error)) from None

    def _parse(self, wire: WireRequest) -> ParsedRequest:
        self.limits.check_inputs(wire.inputs, wire.parameters)
        inputs = {name: plain_input(name, array) for name, array in wire.inputs.items()}
        parameters = {key: value for key, value in wire.parameters.items() if not is_foreign(key)}
        # A request-level value counts wherever it stands; the remaining parameters are sampling keys.
        request_level = {"stream", "exclude_input_in_output", *RETURN_FLAGS, *_SCHEDULING, *RESUME_INPUTS}
        fields = {key: parameters.pop(key) for key in request_level & parameters.keys()}
        fields |= {key: inputs[key] for key in request_level & inputs.keys()}

        stream = field_of(fields, "stream", to_bool, "true or false", False)
        prepends = self._prepends(fields, inputs, stream)
        returns = frozenset(flag for flag in RETURN_FLAGS if field_of(fields, flag, to_bool, "true or false", False))
        keys = self._keys(inputs, parameters)
        params = self._complete(keys.params, returns)
        prompt, text = self.prompts.read(inputs, keys.truncate_prompt_tokens)
        resumed = read_resumed(
            fields,
            params,
            len(prompt),
            seed_given=keys.params.seed is not None,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
        )
        prepends &= not resumed.token_ids  # it was sent before
        timeout = _timeout(wire)
        return ParsedRequest(
            AddRequest(
                request_id=0,
                prompt_token_ids=prompt,
                params=params,
                priority=field_of(fields, "request_priority", _to_int32, f"an integer in {list(_INT32)}", 0),
                tenant=self._tenant(fields, wire.parameters),
                deadline=None if timeout is None else wire.received + timeout,
                cache_salt=self._name(fields, "cache_salt"),
                arrival=wire.received,
                output_token_ids=resumed.token_ids,
            ),
            stream=stream and keys.output_kind != FINAL_ONLY,
            prepend_text=(text or self._tokenizer.decode(prompt)) if prepends else "",
            returns=returns | ({"return_prompt_logprobs"} if params.prompt_logprobs is not None else set()),
            shows_logprobs=keys.params.logprobs is not None,
            timeout=timeout,
            cumulative_logprobs=resumed.cumulative_logprobs,
            ends=resumed.ends,
            cumulative=keys.output_kind == CUMULATIVE,
            separate=self._is_tensorrt_llm,
            name=self.limits.check_name("the request id", wire.request_id),
        )

    def _tenant(self, fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
        return self.limits.check_name("tenant", tenant_of(self._header, parameters, self._name(fields, "tenant")))

    def _name(self, fields: Mapping[str, Any], name: str) -> str:
        return self.limits.check_name(name, field_of(fields, name, to_text, "a string", ""))

    def _prepends(self, fields: Mapping[str, Any], inputs: Mapping[str, Any], stream: bool) -> bool:
        """Whether the output begins with the prompt: by the request, the model's default, or as in vllm_backend."""
        excludes = field_of(fields, "exclude_input_in_output", to_bool, "true or false", None)
        if stream:
            if excludes is False and not self._is_tensorrt_llm:
                raise RequestError(
                    "INVALID_ARG",
                    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
                )
            return False
        if excludes is None:
            excludes = self._config.exclude_input_in_output
        return bool(inputs.get("text_input")) if excludes is None else not excludes

    def _keys(self, inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> RequestKeys:
        """Typed inputs override `sampling_parameters`, which replaces the request parameters."""
        text = inputs.get("sampling_parameters")
        weak = _json_object("sampling_parameters", text) if text else parameters
        typed = {key: inputs[key] for key in _SAMPLING_INPUTS & inputs.keys()}
        layers = [self._defaults, weak, typed]
        default_max_tokens = self._config.default_max_tokens
        return request_keys(layers, self._tokenizer, self.limits, default_max_tokens, self._is_tensorrt_llm)

    def _complete(self, params: SamplingParams, returns: frozenset[str]) -> SamplingParams:
        """Resolve the seed, request the logprobs that the outputs need, check ranges."""
        changes: dict[str, Any] = {}
        self._tokenizer.check_texts(params.stop)
        if params.seed is None:
            changes["seed"] = self._seeds.getrandbits(63)
        if params.logprobs is None and {"return_cumulative_logprob", "return_log_probs"} & returns:
            changes["logprobs"] = 0
        if params.prompt_logprobs is None and "return_prompt_logprobs" in returns:
            changes["prompt_logprobs"] = 0
        params = msgspec.structs.replace(params, **changes)
        try:
            params.validate(vocab_size=self._vocab_size)
        except ValueError as error:
            raise RequestError("INVALID_ARG", str(error)) from None
        self.limits.check_params(params)
        return params


def is_foreign(key: str) -> bool:
    """Whether a request parameter comes from Triton, a client library or a proxy."""
    low = key.lower()
    return low in _FOREIGN or low.startswith(_FOREIGN_PREFIXES) or "-" in low


def plain_input(name: str, array: np.ndarray) -> Any:
    """An input tensor as Python values: a list if the contract says so, else its one element."""
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


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("INVALID_ARG", f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("INVALID_ARG", f'{name}={shown(text)}: must be a JSON object such as {{"temperature": 0.5}}')
    return value


def field_of(fields: Mapping[str, Any], name: str, convert: Any, allowed: str, default: Any) -> Any:
    """A converted value, or `default` for None; raises RequestError, which says what is `allowed`."""
    value = fields.get(name)
    if value is None:
        return default
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        raise RequestError("INVALID_ARG", f"{name}={shown(value)}: must be {allowed}") from None


def _to_int32(value: Any) -> int:
    number = to_int(value)
    if not _INT32[0] <= number <= _INT32[1]:
        raise ValueError
    return number


def _timeout(wire: WireRequest) -> float | None:
    """Seconds.  gRPC clients set a field of the request, the generate endpoint a parameter."""
    value = wire.timeout_us or field_of(wire.parameters, "timeout", to_float, "a number of microseconds", 0)
    if value < 0:
        raise RequestError("INVALID_ARG", f"timeout={value}: must be a number of microseconds, 0 for none")
    return value / 1e6 if value else None
