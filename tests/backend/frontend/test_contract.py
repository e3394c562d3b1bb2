from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from frontend_rig import CHECKPOINT, demo_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.chat import ChatTemplate
from inflight.frontend.contract import INPUTS, GenerationRequest, RequestParser, WireRequest
from inflight.frontend.errors import RequestError

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
}
SPECS = {spec.name: spec for spec in INPUTS}


def tensor(name: str, value: Any) -> np.ndarray:
    """As Triton hands a declared input over."""
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array(values, dtype=DTYPES[SPECS[name].data_type])


def parse(parameters: dict[str, Any] | None = None, timeout_us: int = 0, **inputs: Any) -> GenerationRequest:
    inputs.setdefault("text_input", "the list")
    arrays = {name: tensor(name, value) for name, value in inputs.items() if value is not None}
    return PARSER.parse(WireRequest(arrays, parameters or {}, timeout_us))


def refused(parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(parameters, **inputs)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


# -- vllm_backend's half ---------------------------------------------------------------------


def test_defaults() -> None:
    request = parse()
    assert request.prompt_token_ids == TOKENIZER.encode("the list")
    assert request.stream is False
    assert request.params == SamplingParams(max_tokens=16, seed=request.params.seed)
    assert request.params.seed is not None
    assert request.returns == frozenset()
    assert request.deadline is None


@pytest.mark.parametrize(
    ("stream", "exclude", "prepended"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False), (True, True, False)],
)
def test_prompt_is_prepended_as_in_vllm_backend(stream: bool, exclude: bool | None, prepended: bool) -> None:
    request = parse(stream=stream, exclude_input_in_output=exclude)
    assert request.prepend_text == ("the list" if prepended else "")


def test_streaming_with_the_prompt_is_refused_with_vllm_backends_text() -> None:
    message = refused(stream=True, exclude_input_in_output=False)
    assert message == "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."


def test_sampling_parameters_stand_in_for_the_request_parameters() -> None:
    request = parse({"temperature": 0.9, "nonsense": 1}, sampling_parameters='{"temperature": "0", "top_p": "1"}')
    assert (request.params.temperature, request.params.top_p) == (0.0, 1.0)
    assert parse({"temperature": "0.5"}).params.temperature == 0.5


def test_typed_inputs_win() -> None:
    request = parse(sampling_parameters='{"temperature": 0, "max_tokens": 3}', temperature=0.7)
    assert (request.params.temperature, request.params.max_tokens) == (0.7, 3)


@pytest.mark.parametrize("value", ["5", 5, 5.0, "5.0"])
def test_numbers_may_be_texts(value: Any) -> None:
    assert parse(sampling_parameters=json.dumps({"max_tokens": value})).params.max_tokens == 5


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("False", False), (1, True), ("0", False), (True, True)]
)
def test_booleans_may_be_texts(value: Any, expected: bool) -> None:
    assert parse({"ignore_eos": value}).params.ignore_eos is expected
    assert parse({"stream": value}).stream is expected


def test_return_flags_ask_the_engine_for_what_they_need() -> None:
    request = parse(return_cumulative_logprob=True, return_prompt_logprobs=True, return_token_ids=False)
    assert request.returns == {"return_cumulative_logprob", "return_prompt_logprobs"}
    assert (request.params.logprobs, request.params.prompt_logprobs) == (0, 0)
    assert request.shows_logprobs is False
    assert parse({"logprobs": 2}, return_logprobs=True).shows_logprobs is True
    assert "return_prompt_logprobs" in parse({"prompt_logprobs": 1}).returns


def test_null_is_as_good_as_absent() -> None:
    assert parse(sampling_parameters='{"temperature": null, "stop": null}').params.temperature == 1.0


# -- TensorRT-LLM's, LiteLLM's and OpenAI's names ----------------------------------------------


def test_litellm_generate_body() -> None:
    """`parameters` of its body, which Triton spreads over declared inputs and request parameters."""
    request = parse(max_completion_tokens=7, max_tokens=2000, bad_words=[""], stop_words=[""], stream=False)
    assert request.params.bad_words_ids == []
    assert request.params.stop == []
    assert request.params.max_tokens == 7
    assert parse({"max_completion_tokens": 7, "max_tokens": 2000}).params.max_tokens == 7


def test_tensorrt_llm_names() -> None:
    request = parse(
        max_tokens=20,
        min_length=2,
        bad_words=["list"],
        stop_words=["end", "", "stop"],
        random_seed=2**64 - 1,
        end_id=9,
        pad_id=2,
        beam_width=1,
        length_penalty=1.0,
        return_log_probs=False,
        num_return_sequences=2,
    )
    params = request.params
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (20, 2, 2, 2**64 - 1)
    assert params.stop == ["end", "stop"]
    assert params.stop_token_ids == [9]
    assert params.bad_words_ids == TOKENIZER.bad_words_ids(["list"])
    assert parse(end_id=-1).params.ignore_eos is True


def test_stop_and_stop_words_are_joined() -> None:
    assert parse(stop=["a"], stop_words=["b", "a"]).params.stop == ["b", "a"]


def test_a_key_wins_over_its_alias_in_any_order() -> None:
    assert parse({"seed": 1, "random_seed": 2}).params.seed == 1
    assert parse({"random_seed": 2, "seed": 1}).params.seed == 1


def test_float32_inputs_mean_what_json_would() -> None:
    assert parse(temperature=np.float32(0.7)).params.temperature == parse({"temperature": 0.7}).params.temperature


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("beam_width", 4),
        ("use_beam_search", True),
        ("best_of", 3),
        ("return_context_logits", True),
        ("length_penalty", 2),
    ],
)
def test_what_is_not_there_is_refused_by_name(key: str, value: Any) -> None:
    assert refused({key: value}).startswith(f"{key}={value!r} is not supported: leave it out or set it to")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_bias", "[" * 50_000),
        ("stop_token_ids", "[" * 50_000),
        ("best_of", 10**400),
        ("length_penalty", 10**400),
        ("temperature", 10**400),
        ("stream", "x" * 100_000),
        ("timeout", "x" * 100_000),
        ("request_priority", "x" * 100_000),
        ("k" * 100_000, 1),
    ],
)
def test_values_without_measure_are_refused_in_a_line(key: str, value: Any) -> None:
    message = refused({key: value})
    assert key[:50] in message
    assert len(message) < 1000


def test_lora_is_refused_with_vllm_backends_text() -> None:
    assert refused({"lora_name": "x"}) == "LoRA feature is not enabled."


# -- scheduling ----------------------------------------------------------------------------


def test_scheduling_fields_as_inputs_or_parameters() -> None:
    request = parse(request_priority=-5, tenant="t", cache_salt="s")
    assert (request.priority, request.tenant, request.cache_salt) == (-5, "t", "s")
    request = parse({"request_priority": "3", "tenant": "p"}, sampling_parameters='{"temperature": 0}')
    assert (request.priority, request.tenant) == (3, "p")


def test_timeout_is_the_deadline() -> None:
    request = parse(timeout_us=1_500_000)
    assert request.timeout == 1.5
    assert request.deadline == request.arrival + 1.5
    assert parse({"timeout": 500_000}).timeout == 0.5
    assert parse({"timeout": "0"}).timeout is None
    assert "timeout" in refused({"timeout": -1})
    assert "timeout" in refused({"timeout": "soon"})


def test_what_triton_adds_is_ignored() -> None:
    request = parse(
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
    assert request.params.temperature == 0.25


def test_seeds_repeat_with_a_configured_base() -> None:
    wire = WireRequest({"text_input": tensor("text_input", "a")})
    first, second = parser(seed=1), parser(seed=1)
    seeds = [first.parse(wire).params.seed for _ in range(3)]
    assert seeds == [second.parse(wire).params.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert parse({"seed": -1}).params.seed not in (None, -1)


# -- prompts -------------------------------------------------------------------------------


def test_input_ids_of_either_width() -> None:
    for dtype in (np.int64, np.int32):
        request = PARSER.parse(WireRequest({"input_ids": np.array([5, 6], dtype=dtype)}))
        assert request.prompt_token_ids == [5, 6]
        assert request.prepend_text == ""
    request = parse(text_input=None, input_ids=[5, 6], exclude_input_in_output=False)
    assert request.prepend_text == TOKENIZER.decode([5, 6])


def test_messages_are_rendered_by_the_template() -> None:
    request = parse(text_input=None, messages='[{"role": "user", "content": "hi"}]')
    assert TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False) == (
        "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.prepend_text == ""


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"text_input": None}, "give exactly one of text_input, input_ids, messages"),
        ({"text_input": ""}, "give exactly one of"),
        ({"text_input": None, "input_ids": []}, "give exactly one of"),
        ({"input_ids": [5]}, "text_input and input_ids came"),
        ({"text_input": "word " * 100}, "tokens: allowed are 1 to 63"),
        ({"text_input": "word " * 100_000}, "surely more than 63 tokens"),
        ({"text_input": None, "input_ids": [5] * MAX_LEN}, "the prompt has 64 tokens: allowed are 1 to 63"),
        ({"text_input": None, "input_ids": [5, VOCAB]}, "token id 2560 is not in the vocabulary [0, 2559]"),
        ({"text_input": None, "input_ids": [-1]}, "token id -1"),
        ({"text_input": None, "messages": "hi"}, "messages: not valid JSON"),
        ({"text_input": None, "messages": "[]"}, "messages: got an empty list"),
        ({"text_input": None, "messages": '{"role": "user"}'}, "messages: got a dict"),
        ({"text_input": None, "messages": '[{"content": "x"}]'}, "message 0 is not an object with a role"),
        ({"text_input": None, "messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages: not valid JSON"),
        ({"text_input": None, "messages": "[" * 100_000}, "messages: not valid JSON"),
        ({"sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters: expected a JSON object"),
    ],
)
def test_bad_prompts(inputs: dict[str, Any], says: str) -> None:
    assert says in refused(**inputs)


def test_empty_text_beside_ids_is_no_prompt() -> None:
    assert parse(text_input="", input_ids=[5]).prompt_token_ids == [5]


def test_invalid_utf8_names_the_byte() -> None:
    wire = WireRequest({"text_input": np.array([b"abc\xff"], dtype=np.object_)})
    with pytest.raises(RequestError, match="text_input is not valid UTF-8: byte 0xff at 3"):
        PARSER.parse(wire)


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ({"qqqqqq": 1}, "unknown sampling parameter 'qqqqqq'; known are:"),
        ({"temperature": -1}, "temperature=-1.0 is out of range: allowed is [0.0, 100.0]"),
        ({"temperature": float("nan")}, "temperature=nan: allowed is a finite number"),
        ({"temperature": "inf"}, "temperature='inf': allowed is a finite number"),
        ({"temperature": True}, "temperature=True: allowed is a finite number"),
        ({"temperature": "warm"}, "temperature='warm': allowed is a finite number"),
        ({"top_p": 0}, "top_p=0.0 is out of range"),
        ({"top_k": 1.5}, "top_k=1.5: allowed is an integer"),
        ({"top_k": "many"}, "top_k='many': allowed is an integer"),
        ({"top_k": 1e400}, "top_k=inf: allowed is an integer"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range"),
        ({"max_tokens": [1]}, "max_tokens=[1]: allowed is an integer"),
        ({"min_tokens": 20}, "min_tokens=20 is more than max_tokens=16"),
        ({"n": 129}, "n=129 is out of range"),
        ({"logprobs": 101}, "logprobs=101 is out of range"),
        ({"seed": 2**64}, "seed="),
        ({"presence_penalty": 3}, "presence_penalty=3.0 is out of range"),
        ({"ignore_eos": "maybe"}, "ignore_eos='maybe': allowed is true or false"),
        ({"stream": "maybe"}, "stream='maybe': allowed is true or false"),
        ({"stop": 5}, "stop=5: allowed is a text or a list of texts"),
        ({"stop": ["a", 5]}, "stop=['a', 5]: allowed is"),
        ({"stop": [str(i) for i in range(1025)]}, "stop is too long (1025 entries"),
        ({"stop_words": "x" * 4097}, "stop_words is too long (1 entries, 4097 characters"),
        ({"bad_words": [str(i) + "x" * 4000 for i in range(20)]}, "bad_words is too long (20 entries"),
        ({"stop_token_ids": "[1, 2560]"}, "stop_token_ids: token id 2560 is not in the vocabulary"),
        ({"stop_token_ids": "nope"}, "stop_token_ids='nope': allowed is a list"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids is too long (1025 entries)"),
        ({"logit_bias": {"9999": 1}}, "logit_bias: token id 9999"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias={'1': inf}: allowed is an object"),
        ({"logit_bias": "[]"}, "logit_bias='[]': allowed is an object"),
        ({"request_priority": 2**31}, "request_priority=2147483648: allowed is an integer in"),
        ({"tenant": 5}, "tenant=5: allowed is a text"),
        ({"cache_salt": "\ud800"}, "cache_salt="),
    ],
)
def test_bad_values(parameters: dict[str, Any], says: str) -> None:
    assert says in refused(parameters)


def test_lists_and_objects_as_text() -> None:
    params = parse({"stop_token_ids": "[5, 6, 5]", "logit_bias": '{"7": 500, "8": "-1"}', "stop": "x"}).params
    assert (params.stop_token_ids, params.logit_bias, params.stop) == ([5, 6], {7: 100.0, 8: -1.0}, ["x"])


def test_a_typed_input_with_several_elements_is_refused() -> None:
    assert "temperature has 2 elements: give one" in refused(temperature=[0.5, 0.5])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from([*SPECS, "logit_bias", "logprobs", "timeout", "seed", "best_of"]) | st.text(max_size=6)


@settings(max_examples=400, deadline=None)
@given(parameters=st.dictionaries(keys, json_values, max_size=4), as_tensor=st.booleans())
def test_whatever_comes_is_parsed_or_refused(parameters: dict[str, Any], as_tensor: bool) -> None:
    """No other exception, and what is accepted is fit for the engine."""
    try:
        if as_tensor:
            request = parse(sampling_parameters=json.dumps(parameters))
        else:
            request = parse(parameters)
    except RequestError as error:
        assert error.code == "INVALID_ARG"
    else:
        request.params.validate(vocab_size=VOCAB)
        assert 0 < len(request.prompt_token_ids) < MAX_LEN
