"""Keys of requests as vllm_backend and vLLM name them: their values, their limits, and what an invalid one is told."""

from __future__ import annotations

import difflib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_rig import MAX_LEN, SPECS, TOKENIZER, VOCAB, parse, parse_with, parser, rejected, sampled, sent, tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest

# -- keys of vllm_backend ---------------------------------------------------------------------


def test_defaults() -> None:
    request = parse()
    message = request.engine_request
    assert message.prompt_token_ids == TOKENIZER.encode("the list")
    assert message.params == SamplingParams(max_tokens=16, seed=message.params.seed)
    assert message.params.seed is not None
    assert (message.deadline, message.output_token_ids) == (None, [])
    assert (request.stream, request.returns, request.timeout) == (False, frozenset(), None)


@pytest.mark.parametrize(
    ("stream", "exclude", "prepended"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False), (True, True, False)],
)
def test_the_prompt_is_prepended_as_in_vllm_backend(stream: bool, exclude: bool | None, prepended: bool) -> None:
    request = parse(stream=stream, exclude_input_in_output=exclude)
    assert request.prepend_text == ("the list" if prepended else "")


def test_streaming_with_the_prompt_is_rejected_in_vllm_backends_words() -> None:
    message = rejected(stream=True, exclude_input_in_output=False)
    assert message == "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."


def test_sampling_parameters_replace_the_request_parameters() -> None:
    params = sampled({"temperature": 0.9, "nonsense": 1}, sampling_parameters='{"temperature": "0", "top_p": "1"}')
    assert (params.temperature, params.top_p) == (0.0, 1.0)
    assert sampled({"temperature": "0.5"}).temperature == 0.5


def test_typed_inputs_win() -> None:
    params = sampled(sampling_parameters='{"temperature": 0, "max_tokens": 3}', temperature=0.7)
    assert (params.temperature, params.max_tokens) == (0.7, 3)


def test_numbers_and_booleans_can_be_strings() -> None:
    for value in ("5", 5, 5.0, "5.0"):
        assert sampled(sampling_parameters=json.dumps({"max_tokens": value})).max_tokens == 5
    for value, expected in (("true", True), ("False", False), (1, True), ("0", False), (True, True)):
        assert sampled({"ignore_eos": value}).ignore_eos is expected
        assert parse({"stream": value}).stream is expected


def test_return_flags_request_what_they_need_from_the_engine() -> None:
    request = parse(return_cumulative_logprob=True, return_prompt_logprobs=True, return_token_ids=False)
    assert request.returns == {"return_cumulative_logprob", "return_prompt_logprobs"}
    assert (request.engine_request.params.logprobs, request.engine_request.params.prompt_logprobs) == (0, 0)
    assert request.shows_logprobs is False
    assert parse({"logprobs": 2}, return_logprobs=True).shows_logprobs is True
    assert "return_prompt_logprobs" in parse({"prompt_logprobs": 1}).returns


def test_null_counts_as_absent() -> None:
    assert sampled(sampling_parameters='{"temperature": null, "stop": null}').temperature == 1.0


def test_float32_inputs_equal_the_same_number_in_json() -> None:
    assert sampled(temperature=np.float32(0.7)).temperature == sampled({"temperature": 0.7}).temperature


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("beam_width", 4),
        ("return_context_logits", True),
        ("length_penalty", 2),
    ],
)
def test_unsupported_features_are_rejected_by_name(key: str, value: Any) -> None:
    assert rejected({key: value}).startswith(f"{key}={value!r} is not supported: omit it or set it to")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_bias", "[" * 50_000),
        ("best_of", 10**400),
        ("temperature", 10**400),
        ("stream", "x" * 100_000),
        ("k" * 100_000, 1),
    ],
)
def test_excessive_values_are_rejected_in_one_line(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for, look = [""], difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda word, *rest, **n: looked_for.append(word) or look(word, *rest, **n)
    )
    message = rejected({key: value})
    assert key[:50] in message
    assert len(message) < 1000
    assert max(map(len, looked_for)) <= 100, "a similar key is not looked for at any length"


@pytest.mark.parametrize("key", ["structured_outputs", "stop", "logit_bias"])
def test_a_value_that_can_be_read_may_be_nested_too_deeply_to_be_shown(key: str) -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    assert f"{key}=a list that is nested too deeply: must be" in rejected({key: nested})


def test_lora_is_rejected_in_vllm_backends_words() -> None:
    assert rejected({"lora_name": "x"}) == "LoRA feature is not enabled."


# -- scheduling ----------------------------------------------------------------------------


def test_scheduling_fields_as_inputs_or_parameters() -> None:
    request = sent(request_priority=-5, tenant="t", cache_salt="s")
    assert (request.priority, request.tenant, request.cache_salt) == (-5, "t", "s")
    request = sent({"request_priority": "3", "tenant": "p"}, sampling_parameters='{"temperature": 0}')
    assert (request.priority, request.tenant) == (3, "p")


def test_the_timeout_sets_the_deadline() -> None:
    request = parse(timeout_us=1_500_000)
    assert request.timeout == 1.5
    assert request.engine_request.deadline == request.engine_request.arrival + 1.5
    assert parse({"timeout": 500_000}).timeout == 0.5
    assert parse({"timeout": "0"}).timeout is None
    assert "timeout" in rejected({"timeout": -1})
    assert "timeout" in rejected({"timeout": "soon"})


def test_parameters_that_triton_adds_are_ignored() -> None:
    params = sampled(
        {
            "id": "7",
            "priority": 1,
            "sequence_id": 4,
            "sequence_start": True,
            "triton_enable_empty_final_response": True,
            "binary_data_output": True,
            "User-Agent": "curl",
            "Host": "here",
            "traceparent": "00-1",
            "temperature": 0.25,
        }
    )
    assert params.temperature == 0.25


def test_a_configured_seed_makes_request_seeds_repeatable() -> None:
    wire = WireRequest({"text_input": tensor("text_input", "a")})
    first, second = parser(seed=1), parser(seed=1)
    seeds = [first.parse(wire).engine_request.params.seed for _ in range(3)]
    assert seeds == [second.parse(wire).engine_request.params.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert sampled({"seed": -1}).seed not in (None, -1)


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ({"qqqqqq": 1}, "unknown sampling parameter 'qqqqqq'; known keys:"),
        ({"temperature": -1}, "temperature=-1.0 is out of range: must be in [0.0, 100.0]"),
        ({"temperature": "inf"}, "temperature='inf': must be a finite number"),
        ({"temperature": True}, "temperature=True: must be a finite number"),
        ({"top_p": 0}, "top_p=0.0 is out of range"),
        ({"top_k": 1.5}, "top_k=1.5: must be an integer"),
        ({"top_k": 1e400}, "top_k=inf: must be an integer"),
        ({"min_tokens": 20}, "min_tokens=20 is more than max_tokens=16"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": "five"}, "allowed_token_ids='five': must be a list of token ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: must be 1 to 64, or -1"),
        ({"detokenize": False, "stop": "x"}, "stop needs the text: omit detokenize=False"),
        ({"output_kind": 3}, "output_kind=3: must be 0 (cumulative), 1 (delta) or 2 (final only)"),
        ({"ignore_eos": "maybe"}, "ignore_eos='maybe': must be true or false"),
        ({"stream": "maybe"}, "stream='maybe': must be true or false"),
        ({"stop": 5}, "stop=5: must be a string or a list of"),
        ({"stop": ["a", 5]}, "stop=['a', 5]: must be"),
        ({"stop": {"a": 1}}, "stop={'a': 1}: must be a string or a list of strings"),
        ({"stop_words": "x" * 4097}, "stop contains a string of 4097 characters, 'xxx"),
        ({"stop_token_ids": "[1, 2560]"}, "stop_token_ids: token id 2560 is not in the vocabulary"),
        ({"logit_bias": {"9999": 1}}, "logit_bias: token id 9999"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias={'1': inf}: must be an object"),
        ({"request_priority": 2**31}, "request_priority=2147483648: must be an integer in"),
        ({"tenant": 5}, "tenant=5: must be a string"),
        ({"cache_salt": "\ud800"}, "cache_salt="),
    ],
)
def test_an_invalid_value_of_each_kind_is_named(parameters: dict[str, Any], says: str) -> None:
    assert says in rejected(parameters)


def test_lists_and_objects_may_be_strings() -> None:
    params = sampled({"stop_token_ids": "[5, 6, 5]", "logit_bias": '{"7": 500, "8": "-1"}', "stop": "x"})
    assert (params.stop_token_ids, params.logit_bias, params.stop) == ([5, 6], {7: 100.0, 8: -1.0}, ["x"])


def test_a_typed_input_with_several_elements_is_rejected() -> None:
    assert "temperature has 2 elements: give one" in rejected(temperature=[0.5, 0.5])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from([*SPECS, "logit_bias", "logprobs", "timeout", "seed", "best_of"]) | st.text(max_size=6)


@settings(max_examples=3 * settings().max_examples)
@given(parameters=st.dictionaries(keys, json_values, max_size=4), as_tensor=st.booleans())
def test_any_input_is_parsed_or_rejected(parameters: dict[str, Any], as_tensor: bool) -> None:
    """There is no other exception, and what is accepted the engine can run."""
    try:
        if as_tensor:
            request = sent(sampling_parameters=json.dumps(parameters))
        else:
            request = sent(parameters)
    except RequestError as error:
        assert error.code == "INVALID_ARG"
    else:
        request.params.validate(vocab_size=VOCAB)
        assert 0 < len(request.prompt_token_ids) < MAX_LEN


def test_keys_that_only_the_frontend_reads() -> None:
    request = parse({"flat_logprobs": True, "detokenize": "false", "allowed_token_ids": "[7, 5, 7]"})
    params = request.engine_request.params
    assert (params.detokenize, params.allowed_token_ids) == (False, [7, 5])
    assert parse({"allowed_token_ids": list(range(2000))}).engine_request.params.allowed_token_ids == list(range(2000))


@pytest.mark.parametrize(
    ("kind", "stream", "expected"),
    [
        (None, True, (True, False)),
        (0, True, (True, True)),
        (1, True, (True, False)),
        ("2", True, (False, False)),
        (2, False, (False, False)),
    ],
)
def test_output_kind_is_vllms(kind: Any, stream: bool, expected: tuple[bool, bool]) -> None:
    request = parse({"output_kind": kind}, stream=stream)
    assert (request.stream, request.cumulative) == expected
    assert request.prepend_text == ("" if stream else "the list")


def test_logprobs_may_be_a_boolean_as_tritons_openai_frontend_sends_it() -> None:
    assert (sampled({"logprobs": False}).logprobs, sampled({"logprobs": True}).logprobs) == (None, 1)
    assert not parse({"logprobs": False}).shows_logprobs


def test_max_logprobs_is_a_limit_that_model_json_sets() -> None:
    assert sampled({"logprobs": 100}).logprobs == 100
    with pytest.raises(RequestError, match="logprobs=21: at most 20 are allowed"):
        parse_with({"max_logprobs": 20}, {"logprobs": 21})
    for limit in (-1, VOCAB, VOCAB + 5):
        params = parse_with({"max_logprobs": limit}, {"logprobs": -1, "prompt_logprobs": -1}).engine_request.params
        assert (params.logprobs, params.prompt_logprobs) == (-1, -1)
    with pytest.raises(RequestError, match="logprobs=-1: at most 2559 are allowed"):
        parse_with({"max_logprobs": VOCAB - 1}, {"logprobs": -1})
