"""Triton request with `pooling` or `embedding_request` -> requests for the engine, one for each prompt.  No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.contract import ADAPTER, RETURN_FLAGS, SCHEDULING, WireRequest, is_foreign, plain_input
from inflight.frontend.request.limits import LimitError
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.request.pooled_prompts import Asked, PooledPlan, PooledPrompts
from inflight.frontend.request.values import field_of, to_bool, to_int, to_text

__all__ = ["POOLED_INPUTS", "PooledRequest", "PooledRequestReader", "is_pooled", "void_params"]

POOLED_INPUTS = ("pooling", "embedding_request")
_KEYS = (
    "task",
    "inputs",
    "dimensions",
    "normalize",
    "truncate_prompt_tokens",
    "truncation_side",
    "instruction",
    "raw_scores",
)
_OFF = {"stream", "exclude_input_in_output"}  # accepted with any value that changes nothing


def is_pooled(wire: WireRequest) -> bool:
    return any(name in wire.inputs for name in POOLED_INPUTS)


def void_params() -> SamplingParams:
    """Of a request whose one token is void."""
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class PooledRequest:
    """A checked request for vectors.

    Attributes:
        members: one for each prompt of the plan.
        as_text: the client is vllm_backend's: one embedding, as JSON.
        returns: names of the `return_*` flags that are set.
    """

    plan: PooledPlan
    members: list[ParsedRequest]
    as_text: bool
    returns: frozenset[str]


class PooledRequestReader:
    """Checks and converts requests for vectors.

    Args:
        parser: reads what they share with requests for text.
        model: name of the model, for vllm_backend's error text.
    """

    def __init__(self, parser: RequestParser, prompts: PooledPrompts, model: str) -> None:
        self._parser = parser
        self._prompts = prompts
        self._model = model

    def read(self, wire: WireRequest) -> PooledRequest:
        """Raises RequestError (INVALID_ARG): the message quotes the value and says what is allowed."""
        try:
            return self._read(wire)
        except LimitError as error:
            raise RequestError("INVALID_ARG", str(error)) from None

    def _read(self, wire: WireRequest) -> PooledRequest:
        self._parser.limits.check_inputs(wire.inputs, wire.parameters)
        inputs = {name: plain_input(name, array) for name, array in wire.inputs.items()}
        parameters = {key: value for key, value in wire.parameters.items() if not is_foreign(key)}
        fields = {**parameters, **inputs}
        self._expect_known(fields)
        name, *more = [name for name in POOLED_INPUTS if name in inputs]
        if more:
            raise RequestError("INVALID_ARG", "got pooling and embedding_request: give one of them")
        as_text = name == "embedding_request"
        if as_text and "embed" not in self._prompts.facts.tasks:
            raise RequestError("INVALID_ARG", f"Model {self._model} does not support 'embed' request")
        values = _object(name, inputs[name])
        plan = self._prompts.plan(_embedding(values) if as_text else _asked(values))
        shared = self._parser.scheduling(wire, fields)
        trace = self._parser.trace_of(wire, "embeddings")
        traced = trace is not None
        adapter = self._parser.adapter_of(fields)
        ref = None if adapter is None else adapter.ref
        added = [
            AddRequest(
                0, prompt, void_params(), attached=plan.attached(i, ref, traced), arrival=wire.received, **shared
            )
            for i, prompt in enumerate(plan.prompts)
        ]
        timeout = None if shared["deadline"] is None else shared["deadline"] - wire.received
        client_id = self._parser.limits.check_name("the request id", wire.request_id)
        members = [
            ParsedRequest(message, timeout=timeout, name=client_id, trace=trace, quiet=place > 0, adapter=adapter)
            for place, message in enumerate(added)
        ]
        flags = (flag for flag in RETURN_FLAGS if field_of(fields, flag, to_bool, "true or false", False))
        return PooledRequest(plan, members, as_text, frozenset(flags))

    def _expect_known(self, fields: Mapping[str, Any]) -> None:
        """Whatever concerns text is refused by name."""
        if field_of(fields, "stream", to_bool, "true or false", False):
            raise RequestError("INVALID_ARG", "stream=True: vectors come in one response; leave it out")
        known = {*POOLED_INPUTS, *SCHEDULING, *ADAPTER, *RETURN_FLAGS, *_OFF, "timeout"}
        for key in fields:
            if key not in known:
                takes = ", ".join((*SCHEDULING, *ADAPTER))
                raise RequestError(
                    "INVALID_ARG", f"{key[:100]}: not for a request with pooling, which takes {takes}; leave it out"
                )


def _object(name: str, text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError("INVALID_ARG", f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("INVALID_ARG", f"{name}={shown(text)}: must be a JSON object")
    return value


def _asked(values: dict[str, Any]) -> Asked:
    for key in values:
        if key not in _KEYS:
            raise RequestError("INVALID_ARG", f"pooling: unknown key {key[:100]!r}; known: {', '.join(_KEYS)}")
    inputs = values.get("inputs")
    if not isinstance(inputs, list):
        raise RequestError("INVALID_ARG", f"pooling: inputs={shown(inputs)}: must be a list")
    return Asked(
        task=field_of(values, "task", to_text, '"embed", "score" or "classify"', ""),
        inputs=inputs,
        dimensions=field_of(values, "dimensions", to_int, "an integer", None),
        normalize=field_of(values, "normalize", to_bool, "true or false", None),
        truncate=field_of(values, "truncate_prompt_tokens", to_int, "an integer", None),
        side=field_of(values, "truncation_side", to_text, '"left" or "right"', "right"),
        instruction=field_of(values, "instruction", to_text, "a string", None),
        raw_scores=field_of(values, "raw_scores", to_bool, "true or false", False),
    )


def _embedding(values: dict[str, Any]) -> Asked:
    """vllm_backend's `embedding_request`; keys that it ignores are ignored."""
    params = values.get("pooling_params") or {}
    if "input" not in values or not isinstance(params, dict):
        raise RequestError(
            "INVALID_ARG", 'embedding_request: must be {"input": text or token ids, "pooling_params": {...}}'
        )
    given = params.get("dimensions")
    first = given[0] if isinstance(given, list) and given else given
    dimensions = field_of({"dimensions": first}, "dimensions", to_int, "a list with an integer", None)
    return Asked("embed", [values["input"]], dimensions)
