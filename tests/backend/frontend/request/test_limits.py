"""The limits of model.json for one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontend_rig import CHECKPOINT, demo_tokenizer

from inflight.config import ConfigError, EngineConfig
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import RequestParser

TOKENIZER = demo_tokenizer()
CHAT = ChatTemplate.load(str(CHECKPOINT))


def parse(
    config: dict[str, Any], parameters: dict[str, Any], name: str = "", **inputs: np.ndarray
) -> ParsedRequest | str:
    """The request, or why it was refused."""
    given = {"text_input": np.array([b"the list"], dtype=np.object_), **inputs}
    parser = RequestParser(EngineConfig(model="m", **config), TOKENIZER, CHAT, 64, 2560)
    try:
        return parser.parse(WireRequest(given, parameters, request_id=name))
    except RequestError as error:
        assert error.code == "INVALID_ARG"
        return error.message


CASES = [
    # limit, its value, what fits, what does not, what the error says came
    ("max_n", 3, {"n": 3}, {"num_return_sequences": 4}, "n=4"),
    ("max_logprobs", 5, {"logprobs": 5}, {"logprobs": 6}, "logprobs=6"),
    ("max_logprobs", 5, {"prompt_logprobs": 5}, {"prompt_logprobs": 6}, "prompt_logprobs=6"),
    ("max_stop_strings", 2, {"stop": ["a", "b", "a", ""]}, {"stop": ["a", "b", "c"]}, "stop has 3 strings"),
    ("max_stop_strings", 2, {"stop": ["a", "b"]}, {"stop": ["a", "b"], "stop_words": ["c"]}, "stop has 3 strings"),
    ("max_bad_words", 2, {"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "bad_words has 3 strings"),
    ("max_stop_bytes", 6, {"stop": ["你", "abc"]}, {"stop": ["你", "abcd"]}, "the strings of stop have 7 bytes"),
    (
        "max_stop_bytes",
        6,
        {"bad_words": ["abcdef"]},
        {"bad_words": ["你你你"]},
        "the strings of bad_words have 9 bytes",
    ),
    ("max_stop_token_ids", 2, {"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6, 7]}, "stop_token_ids has 3 token"),
    ("max_name_bytes", 4, {"tenant": "gold"}, {"tenant": "silver"}, "tenant has 6 bytes"),
    ("max_name_bytes", 4, {"cache_salt": "salt"}, {"cache_salt": "盐盐"}, "cache_salt has 6 bytes"),
    ("max_input_bytes", 20, {"stop": "x" * 20}, {"stop": "x" * 21}, "stop has 21 bytes"),
]


@pytest.mark.parametrize(("key", "limit", "fits", "exceeds", "came"), CASES)
def test_a_value_beyond_a_limit_is_refused_with_the_limit_and_its_key(
    key: str, limit: int, fits: dict[str, Any], exceeds: dict[str, Any], came: str
) -> None:
    assert isinstance(parse({key: limit}, fits), ParsedRequest)
    message = parse({key: limit}, exceeds)
    assert isinstance(message, str)
    assert message.startswith(came)
    assert message.endswith(f": at most {limit} are allowed ({key} in model.json)")
    assert isinstance(parse({}, exceeds), ParsedRequest), "the default is larger"


def test_a_long_request_id_is_refused() -> None:
    assert parse({"max_name_bytes": 4}, {}, name="12345") == (
        "the request id has 5 bytes: at most 4 are allowed (max_name_bytes in model.json)"
    )
    request = parse({}, {}, name="1" * 1024)
    assert isinstance(request, ParsedRequest) and request.name == "1" * 1024


@pytest.mark.parametrize(
    ("name", "array", "size"),
    [
        ("text_input", np.array([b"x" * 30], dtype=np.object_), 30),
        ("stop", np.array([b"x" * 15, b"y" * 15], dtype=np.object_), 30),
        ("input_ids", np.zeros(4, dtype=np.int64), 32),
    ],
)
def test_large_tensors_are_refused_before_anything_looks_into_them(name: str, array: np.ndarray, size: int) -> None:
    said = parse({"max_input_bytes": 29}, {}, **{name: array})
    assert said == f"{name} has {size} bytes: at most 29 are allowed (max_input_bytes in model.json)"


def test_the_name_of_a_large_parameter_is_cut_short_in_the_message() -> None:
    said = parse({"max_input_bytes": 20}, {"k" * 5000: "x" * 21})
    assert isinstance(said, str) and len(said) < 200


def test_the_default_limits_allow_long_lists() -> None:
    longest = {
        "n": 128,
        "stop": [f"{i:04}" + "x" * 60 for i in range(1024)],
        "bad_words": [f"{i:04}" + "x" * 60 for i in range(1024)],
        "stop_token_ids": list(range(1024)),
        "allowed_token_ids": list(range(2560)),
        "logit_bias": {str(i): 1 for i in range(2560)},
    }
    assert isinstance(parse({}, longest), ParsedRequest)


def test_a_limit_is_at_least_one() -> None:
    for key in {case[0] for case in CASES} - {"max_logprobs"}:
        with pytest.raises(ConfigError, match=f"{key}=0"):
            EngineConfig.from_dict({"model": "m", key: 0})
