"""Triton request -> `ParsedRequest`.  No torch, no Triton types."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inflight.config import EngineConfig
from inflight.engine.attached import Attached
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.adapters.adapter_files import KeptAdapter
from inflight.frontend.adapters.registry import AdapterRegistry
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.adapter_choice import chosen_adapter
from inflight.frontend.request.contract import RETURN_FLAGS, SCHEDULING, WireRequest, is_foreign, plain_input
from inflight.frontend.request.generation_config import generation_defaults
from inflight.frontend.request.limits import LimitError, Limits
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.prompts import PromptReader
from inflight.frontend.request.resume import RESUME_INPUTS, read_resumed
from inflight.frontend.request.sampling_keys import CUMULATIVE, FINAL_ONLY, SAMPLING_KEYS, RequestKeys, request_keys
from inflight.frontend.request.tenant import tenant_of
from inflight.frontend.request.trace_context import RequestTrace, trace_of
from inflight.frontend.request.values import field_of, to_bool, to_float, to_int, to_text
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["NO_TEXT", "RequestParser"]

NO_TEXT = "this checkpoint has no language model head, so it generates no text; send the input pooling"

_INT32 = (-(2**31), 2**31 - 1)


class RequestParser:
    """Checks and converts requests.  No later part of the frontend checks them again.

    Args:
        config: engine options (`default_max_tokens`, `exclude_input_in_output`, `seed`, `wire_format`, and the limits).
        max_model_len, vocab_size, eos_token_ids: of the loaded checkpoint.
        number: of this frontend among the frontends of the engine: their seeds differ.
        generates: the checkpoint has a language model head.
        adapters: that requests can choose; None: there are none.
        checkpoint_id: for `ParsedRequest`.

    Attributes:
        prompts: reads prompts.
        limits: checks sizes.
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
        generates: bool = True,
        adapters: AdapterRegistry | None = None,
        checkpoint_id: str | None = None,
    ) -> None:
        self._checkpoint_id = checkpoint_id
        self._adapters = adapters or AdapterRegistry(False)
        self._config = config
        self._generates = generates
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
        """Raises RequestError (INVALID_ARG): the message quotes the value and says what is allowed."""
        if not self._generates:
            raise RequestError("INVALID_ARG", NO_TEXT)
        try:
            return self._parse(wire)
        except (TokenizerError, LimitError) as error:
            raise RequestError("INVALID_ARG", str(error)) from None

    def _parse(self, wire: WireRequest) -> ParsedRequest:
        self.limits.check_inputs(wire.inputs, wire.parameters)
        inputs = {name: plain_input(name, array) for name, array in wire.inputs.items()}
        parameters = {key: value for key, value in wire.parameters.items() if not is_foreign(key)}
        # Request-level values can be inputs or parameters; the remaining parameters are sampling keys.
        request_level = {"stream", "exclude_input_in_output", *RETURN_FLAGS, *SCHEDULING, *RESUME_INPUTS, "lora_digest"}
        fields = {key: parameters.pop(key) for key in request_level & parameters.keys()}
        fields |= {key: inputs[key] for key in request_level & inputs.keys()}

        stream = field_of(fields, "stream", to_bool, "true or false", False)
        prepends = self._prepends(fields, inputs, stream)
        returns = frozenset(flag for flag in RETURN_FLAGS if field_of(fields, flag, to_bool, "true or false", False))
        keys = self._keys(inputs, parameters)
        adapter = chosen_adapter(self._adapters, self.limits, keys.lora_name, keys.lora_task_id, fields)
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
        prepends &= not resumed.token_ids  # the client has it already
        scheduling = self.scheduling(wire, fields)
        trace = self.trace_of(wire, "chat" if "messages" in inputs else "text_completion")
        return ParsedRequest(
            AddRequest(
                request_id=0,
                prompt_token_ids=prompt,
                params=params,
                arrival=wire.received,
                output_token_ids=resumed.token_ids,
                attached=_attached(trace, adapter, bool(resumed.token_ids)),
                **scheduling,
            ),
            stream=stream and keys.output_kind != FINAL_ONLY,
            prepend_text=(text or self._tokenizer.decode(prompt)) if prepends else "",
            returns=returns | ({"return_prompt_logprobs"} if params.prompt_logprobs is not None else set()),
            shows_logprobs=keys.params.logprobs is not None,
            timeout=_timeout(wire),
            cumulative_logprobs=resumed.cumulative_logprobs,
            ends=resumed.ends,
            cumulative=keys.output_kind == CUMULATIVE,
            separate=self._is_tensorrt_llm,
            name=self.limits.check_name("the request id", wire.request_id),
            trace=trace,
            adapter=adapter,
            checkpoint_id=self._checkpoint_id,
        )

    def adapter_of(self, fields: Mapping[str, Any]) -> KeptAdapter | None:
        """The adapter of a request without sampling keys; raises as `chosen_adapter`."""
        name = field_of(fields, "lora_name", to_text, "a string", None)
        numbers = [field_of(fields, key, to_int, "an integer", None) for key in ("lora_task_id", "lora_id")]
        number = next((number for number in numbers if number is not None), None)
        return chosen_adapter(self._adapters, self.limits, name, number, fields)

    def scheduling(self, wire: WireRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `AddRequest` for scheduling: priority, tenant, deadline and cache salt."""
        timeout = _timeout(wire)
        return {
            "priority": field_of(fields, "request_priority", _to_int32, f"an integer in {list(_INT32)}", 0),
            "tenant": self._tenant(fields, wire.parameters),
            "deadline": None if timeout is None else wire.received + timeout,
            "cache_salt": self._name(fields, "cache_salt"),
        }

    def trace_of(self, wire: WireRequest, operation: str) -> RequestTrace | None:
        """For the span of a request; None: it has none."""
        return None if self._config.otlp_traces_endpoint is None else trace_of(wire.parameters, operation)

    def _tenant(self, fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
        return self.limits.check_name("tenant", tenant_of(self._header, parameters, self._name(fields, "tenant")))

    def _name(self, fields: Mapping[str, Any], name: str) -> str:
        return self.limits.check_name(name, field_of(fields, name, to_text, "a string", ""))

    def _prepends(self, fields: Mapping[str, Any], inputs: Mapping[str, Any], stream: bool) -> bool:
        """Whether the output begins with the prompt: the request decides, then model.json, then vllm_backend's rule."""
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
        typed = {key: inputs[key] for key in SAMPLING_KEYS.keys() & inputs.keys()}
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


def _attached(trace: RequestTrace | None, adapter: KeptAdapter | None, resumed: bool) -> Attached | None:
    if trace is None and adapter is None and not resumed:
        return None
    return Attached(traced=trace is not None, adapter=None if adapter is None else adapter.ref, resumed=resumed)


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("INVALID_ARG", f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("INVALID_ARG", f'{name}={shown(text)}: must be a JSON object such as {{"temperature": 0.5}}')
    return value


def _to_int32(value: Any) -> int:
    number = to_int(value)
    if not _INT32[0] <= number <= _INT32[1]:
        raise ValueError
    return number


def _timeout(wire: WireRequest) -> float | None:
    """Seconds.  gRPC clients set a field of the request; the generate endpoint sets a parameter."""
    value = wire.timeout_us or field_of(wire.parameters, "timeout", to_float, "a number of microseconds", 0)
    if value < 0:
        raise RequestError("INVALID_ARG", f"timeout={value}: must be a number of microseconds, 0 for none")
    return value / 1e6 if value else None
