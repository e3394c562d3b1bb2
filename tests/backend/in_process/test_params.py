"""`SamplingParams` is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest

import inflight
from inflight import RequestOutputKind, SamplingParams
from inflight.engine.sampling_params import SamplingParams as EngineParams
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.in_process.params import engine_params


class Words:
    """A tokenizer of letters."""

    def check_texts(self, texts: Any) -> None:
        pass

    def bad_words_ids(self, words: Any) -> list[list[int]]:
        return [[ord(letter) for letter in word] for word in words]


TOKENIZER: Tokenizer = Words()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(max_tokens="3"), r"max_tokens='3' of type str: must be an integer or None"),
        (dict(max_tokens=True), r"max_tokens=True of type bool: must be an integer"),
        (dict(stop_token_ids=5), r"stop_token_ids=5 of type int: must be a list of token ids"),
        (dict(stop_token_ids="5"), r"stop_token_ids='5' of type str: must be a list of token ids"),
        (dict(stop_token_ids=["a"]), r"stop_token_ids=\['a'\] of type list: must be a list of token ids"),
        (dict(top_k=2.5), r"top_k=2.5 of type float: must be an integer"),
        (dict(temperature="0"), r"temperature='0' of type str: must be a finite number"),
        (dict(temperature=float("nan")), r"temperature=nan of type float: must be a finite number"),
        (dict(temperature=None), r"temperature=None of type NoneType: must be a finite number"),
        (dict(stop=b"a"), r"stop=.* of type bytes: must be a string, a list of strings or None"),
        (dict(stop=["a", 5]), r"stop=\['a', 5\] of type list: must be a string"),
        (dict(stop="\ud800"), r"stop=.* of type str: must be a string"),
        (dict(logit_bias=[1]), r"logit_bias=\[1\] of type list: must be a dict"),
        (dict(ignore_eos=1), r"ignore_eos=1 of type int: must be True or False"),
        (dict(bad_words_ids=[1]), r"bad_words_ids=\[1\] of type list: must be a list of lists"),
        (dict(top_p=2.0), r"top_p=2.0 is out of range: must be in \(0.0, 1.0\]"),
        (dict(n=0), r"n=0 is out of range"),
        (dict(min_tokens=20), r"min_tokens=20 is more than max_tokens=16"),
        (dict(allowed_token_ids=[]), r"allowed_token_ids is empty"),
        (dict(stop="a", detokenize=False), r"stop needs the text"),
        (dict(output_kind=3), r"output_kind=3 of type int: must be a RequestOutputKind, or 0 \(cumulative\)"),
        (dict(spaces_between_special_tokens=False), r"spaces_between_special_tokens=False of type bool: must be True"),
        (dict(skip_reading_prefix_cache=True), r"must be None or False; enable_prefix_caching=False is for all"),
        (dict(extra_args={"a": 1}), r"extra_args=.* must be None: no rule here reads them"),
        (dict(structured_outputs={"json": 3}), r"structured_outputs: json=3: must be an object"),
        (dict(structured_outputs={"jason": {}}), r"structured_outputs: unknown key 'jason'"),
        (dict(structured_outputs={"regex": "a"}, grammar=inflight.grammar(regex="a")), r"give one of them"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="beams"):
        SamplingParams(beams=3)  # type: ignore[call-arg]


def test_what_vllm_takes_is_taken() -> None:
    loose: dict[str, Any] = dict(top_k=np.int64(3), max_tokens=8.0, temperature=np.float32(0.5), logit_bias={"5": 200})
    given = SamplingParams(
        stop="and", stop_token_ids=None, bad_words="no", seed=-1, logprobs=True, prompt_logprobs=False, **loose
    )
    assert (given.stop, given.stop_token_ids, given.bad_words) == (["and"], [], ["no"])
    assert (given.seed, given.logprobs, given.prompt_logprobs) == (None, 1, None)
    assert (given.top_k, given.max_tokens, given.temperature, given.logit_bias) == (3, 8, 0.5, {5: 100.0})
    assert SamplingParams(structured_outputs={"regex": "a"}) == SamplingParams(grammar=inflight.grammar(regex="a"))
    assert repr(SamplingParams(stop="and", n=2)) == "SamplingParams(n=2, stop=['and'])"


@dataclass
class StructuredOutputsParams:
    """With the fields that vLLM's has."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    _backend: str | None = field(default=None, init=False)


class TheirKind(Enum):
    DELTA = 1


def test_objects_of_vllm_are_taken_by_their_fields() -> None:
    constraint: Any = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=constraint).structured_outputs == inflight.grammar(regex="a")
    loose: dict[str, Any] = dict(output_kind=TheirKind.DELTA, extra_args=None, skip_reading_prefix_cache=False)
    assert SamplingParams(**loose).output_kind is RequestOutputKind.DELTA
    params = SamplingParams(n=2)
    assert params.clone() == params


def test_parameters_for_the_engine() -> None:
    given = SamplingParams(
        max_tokens=None, bad_words=["ab"], bad_words_ids=[[7]], structured_outputs={"regex": "a"}, seed=5
    )
    assert engine_params(given, TOKENIZER, room=40) == EngineParams(
        max_tokens=40, bad_words_ids=[[7], [97, 98]], grammar=inflight.grammar(regex="a"), seed=5
    )
    seeds = {engine_params(SamplingParams(), TOKENIZER, 1).seed for _ in range(3)}
    assert None not in seeds and len(seeds) == 3
    assert engine_params(SamplingParams(max_tokens=None, min_tokens=9), TOKENIZER, room=-3).max_tokens == 9


def test_every_parameter_of_the_engine_can_be_given() -> None:
    assert set(EngineParams.__struct_fields__) <= set(SamplingParams.__struct_fields__)
    for name, default in zip(EngineParams.__struct_fields__, EngineParams.__struct_defaults__):
        if isinstance(default, (int, float, bool, type(None))):
            assert getattr(SamplingParams(), name) == default, name
