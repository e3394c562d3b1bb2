from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from frontend_rig import CHECKPOINT, demo_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import INPUTS, WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.text.tokenizer import Tokenizer

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


# -- TensorRT-LLM's, LiteLLM's and OpenAI's names ----------------------------------------------


def test_litellm_generate_body() -> None:
    """`parameters` of its body, which Triton spreads over declared inputs and request parameters."""
    params = sampled(max_completion_tokens=7, max_tokens=2000, bad_words=[""], stop_words=[""], stream=False)
    assert params.bad_words_ids == []
    assert params.stop == []
    assert params.max_tokens == 7
    assert sampled({"max_completion_tokens": 7, "max_tokens": 2000}).max_tokens == 7


def test_tensorrt_llm_names() -> None:
    params = sampled(
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
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (20, 2, 2, 2**64 - 1)
    assert params.stop == ["end", "stop"]
    assert params.stop_token_ids == [9]
    assert params.bad_words_ids == TOKENIZER.bad_words_ids(["list"])
    assert sampled(end_id=-1).ignore_eos is True


def test_stop_and_stop_words_are_joined() -> None:
    assert sampled(stop=["a"], stop_words=["b", "a"]).stop == ["b", "a"]


def test_a_key_wins_over_its_alias_in_either_order() -> None:
    assert sampled({"seed": 1, "random_seed": 2}).seed == 1
    assert sampled({"random_seed": 2, "seed": 1}).seed == 1


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
def test_excessive_values_are_rejected_in_one_line(key: str, value: Any) -> None:
    message = rejected({key: value})
    assert key[:50] in message
    assert len(message) < 1000


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


# -- prompts -------------------------------------------------------------------------------


def test_input_ids_of_either_width() -> None:
    for dtype in (np.int64, np.int32):
        request = PARSER.parse(WireRequest({"input_ids": np.array([5, 6], dtype=dtype)}))
        assert request.engine_request.prompt_token_ids == [5, 6]
        assert request.prepend_text == ""
    request = parse(text_input=None, input_ids=[5, 6], exclude_input_in_output=False)
    assert request.prepend_text == TOKENIZER.decode([5, 6])


def test_messages_are_rendered_with_the_template() -> None:
    request = parse(text_input=None, messages='[{"role": "user", "content": "hi"}]')
    assert TOKENIZER.decode(request.engine_request.prompt_token_ids, skip_special_tokens=False) == (
        "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.prepend_text == ""


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"text_input": None}, "give exactly one of text_input, input_ids, messages"),
        (
            {"text_input": "", "messages": "", "input_ids": [5], "stop": "", "sampling_parameters": "{"},
            "not valid JSON",
        ),
        ({"text_input": None, "input_ids": []}, "give exactly one of"),
        ({"input_ids": [5]}, "got text_input and input_ids: give exactly one"),
        ({"text_input": "word " * 100}, "tokens: it must be 1 to 63 long"),
        ({"text_input": "word " * 100_000}, "must be more than 63 tokens"),
        ({"text_input": None, "input_ids": [5] * MAX_LEN}, "the prompt has 64 tokens: it must be 1 to 63 long"),
        ({"text_input": None, "input_ids": [5, VOCAB]}, "token id 2560 is not in the vocabulary [0, 2559]"),
        ({"text_input": None, "messages": "hi"}, "messages: not valid JSON"),
        ({"text_input": None, "messages": '[{"content": "x"}]'}, "message 0 is not an object with a role"),
        ({"text_input": None, "messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages: not valid JSON"),
        ({"sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters='[1]': must be a JSON object"),
    ],
)
def test_invalid_prompts(inputs: dict[str, Any], says: str) -> None:
    assert says in rejected(**inputs)


def test_an_empty_text_beside_ids_does_not_count_as_a_prompt() -> None:
    assert sent(text_input="", input_ids=[5]).prompt_token_ids == [5]


def test_invalid_utf8_names_the_byte() -> None:
    wire = WireRequest({"text_input": np.array([b"abc\xff"], dtype=np.object_)})
    with pytest.raises(RequestError, match="text_input is not valid UTF-8: byte 0xff at 3"):
        PARSER.parse(wire)


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


# -- keys of vLLM beyond the common ones -------------------------------------------------------


def parse_with(config: dict[str, Any], parameters: dict[str, Any] | None = None, **inputs: Any) -> ParsedRequest:
    """As `parse`, by a parser with other options of `model.json`."""
    inputs.setdefault("text_input", "the list")
    arrays = {name: tensor(name, value) for name, value in inputs.items() if value is not None}
    return parser(**config).parse(WireRequest(arrays, parameters or {}))


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


def test_an_empty_text_is_the_start_token_where_the_tokenizer_adds_one() -> None:
    assert sent(text_input="").prompt_token_ids == TOKENIZER.encode("") == [0]
    assert parse(text_input="").prepend_text == ""
    bare = Tokenizer.load(str(CHECKPOINT))
    bare.encode = lambda text, *, add_special_tokens=True: TOKENIZER.encode(text, add_special_tokens=False)
    plain = RequestParser(EngineConfig(model="m"), bare, CHAT, MAX_LEN, VOCAB)
    with pytest.raises(RequestError, match="text_input is empty, and the tokenizer adds no start token"):
        plain.parse(WireRequest({"text_input": tensor("text_input", "")}))


WORDS = " ".join(f"word{k}" for k in range(60))


@pytest.mark.parametrize("count", [2, 62])
def test_a_truncated_text_keeps_its_start_token_and_its_end(count: int) -> None:
    whole = TOKENIZER.encode(WORDS)
    found = sent({"truncate_prompt_tokens": count}, text_input=WORDS).prompt_token_ids
    assert found == [whole[0], *whole[len(whole) - count + 1 :]]
    assert len(found) == count
    assert parse({"truncate_prompt_tokens": count}, text_input=WORDS).prepend_text == WORDS


def test_truncation_to_what_fits() -> None:
    assert "tokens: it must be 1 to 63 long" in rejected(text_input=WORDS)
    assert len(sent({"truncate_prompt_tokens": -1}, text_input=WORDS).prompt_token_ids) == MAX_LEN - 1
    assert len(sent({"truncate_prompt_tokens": -1}, text_input=WORDS * 9999).prompt_token_ids) == MAX_LEN - 1
    assert sent({"truncate_prompt_tokens": 1}, text_input=WORDS).prompt_token_ids == TOKENIZER.encode(WORDS)[-1:]
    assert sent({"truncate_prompt_tokens": 9}, text_input="the list").prompt_token_ids == TOKENIZER.encode("the list")
    ids = sent({"truncate_prompt_tokens": 2}, text_input=None, input_ids=[5, 6, 7]).prompt_token_ids
    assert ids == [6, 7], "ids are taken as they are"
    messages = json.dumps([{"role": "user", "content": WORDS}])
    rendered = TOKENIZER.encode(CHAT.render(messages), add_special_tokens=False)
    ids = sent({"truncate_prompt_tokens": 30}, text_input=None, messages=messages).prompt_token_ids
    assert ids == rendered[-30:]


# -- what model.json says about clients ---------------------------------------------------------


@pytest.mark.parametrize(("default", "prepended"), [(None, "the list"), (False, "the list"), (True, "")])
def test_model_json_sets_the_default_of_exclude_input_in_output(default: bool | None, prepended: str) -> None:
    config = {"exclude_input_in_output": default}
    assert parse_with(config).prepend_text == prepended
    assert parse_with(config, exclude_input_in_output=False).prepend_text == "the list", "the request decides"
    assert parse_with(config, exclude_input_in_output=True).prepend_text == ""
    assert parse_with(config, stream=True).prepend_text == "", "a default never makes a stream an error"


class TestTensorRTLLM:
    CONFIG = MappingProxyType({"wire_format": "tensorrt_llm"})

    def sampled(self, **inputs: Any) -> SamplingParams:
        return parse_with(self.CONFIG, **inputs).engine_request.params

    def test_streaming_ignores_that_the_prompt_is_asked_for(self) -> None:
        request = parse_with(self.CONFIG, stream=True, exclude_input_in_output=False)
        assert (request.prepend_text, request.separate) == ("", True)
        assert parse_with(self.CONFIG, exclude_input_in_output=False).prepend_text == "the list"

    def test_sampling_is_greedy_unless_top_k_or_top_p_is_given(self) -> None:
        assert self.sampled(temperature=0.7).temperature == 0.0
        assert self.sampled(temperature=0.7, top_k=0, top_p=0.0).temperature == 0.0
        assert self.sampled(temperature=0.7, top_k=5).temperature == 0.7
        assert self.sampled(temperature=0.7, top_p=0.9, top_k=0).temperature == 0.7
        assert (self.sampled(top_k=5, top_p=0.0).top_k, self.sampled(top_k=5, top_p=0.0).top_p) == (5, 1.0)
        assert sampled(temperature=0.7).temperature == 0.7, "vllm_backend's clients sample"
        assert "top_p=0.0 is out of range" in rejected(top_p=0.0)

    def test_return_log_probs_asks_the_engine_for_the_chosen_tokens_alone(self) -> None:
        request = parse_with(self.CONFIG, return_log_probs=True)
        assert request.engine_request.params.logprobs == 0
        assert "return_log_probs" in request.returns
        assert not request.shows_logprobs
