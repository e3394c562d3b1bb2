"""Requests that continue an output: parsing, and that the continuation completes the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frontend_rig import CHECKPOINT, RecordingClient, demo_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import make_core
from resumer import CoreEngine, Received, ScriptEngine, SteppedEngine, receive

from inflight.config import EngineConfig
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.output.request_state import RequestState
from inflight.frontend.request.contract import INPUTS, WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.request.resume import SequenceEnd

TOKENIZER = demo_tokenizer()
VOCAB = TOKENIZER.size
EOS = 2
MAX_LEN = 64
DTYPES = {"TYPE_INT64": np.int64, "TYPE_INT32": np.int32, "TYPE_FP64": np.float64}
SPECS = {spec.name: spec for spec in INPUTS}
CHAT = ChatTemplate.load(str(CHECKPOINT))
PARSER = RequestParser(EngineConfig(model="m"), TOKENIZER, CHAT, MAX_LEN, VOCAB, eos_token_ids=[EOS])


def text(value: str) -> np.ndarray:
    return np.array([value.encode()], dtype=np.object_)


def parse(sampling: dict[str, Any], resume: dict[str, Any], as_parameters: bool = False) -> ParsedRequest:
    """A request with a prompt of three tokens; `resume` as inputs, or in request parameters, which are strings."""
    inputs = {"input_ids": np.array([5, 6, 7]), "sampling_parameters": text(json.dumps({"temperature": 0, **sampling}))}
    if as_parameters:
        return PARSER.parse(WireRequest(inputs, {name: json.dumps(value) for name, value in resume.items()}))
    arrays = {name: np.array(value, dtype=DTYPES[SPECS[name].data_type]) for name, value in resume.items()}
    return PARSER.parse(WireRequest({**inputs, **arrays}))


def refusal(sampling: dict[str, Any], resume: dict[str, Any], as_parameters: bool = False) -> str:
    with pytest.raises(RequestError) as caught:
        parse(sampling, resume, as_parameters)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


@pytest.mark.parametrize("as_parameters", [False, True])
@pytest.mark.parametrize("counts", [{}, {"resume_token_counts": [2]}])
def test_one_sequence_is_a_list_of_ids(counts: dict[str, Any], as_parameters: bool) -> None:
    resume = {"resume_token_ids": [9, 8], "resume_cumulative_logprob": [-1.25], **counts}
    request = parse({}, resume, as_parameters)
    assert request.engine_request.output_token_ids == [[9, 8]]
    assert (request.cumulative_logprobs, request.ends) == ([-1.25], [None])


def test_a_resumed_request_waits_for_kv_of_another_server_and_its_replay_does_not() -> None:
    request = parse({"logprobs": 1}, {"resume_token_ids": [9, 8]})
    assert request.engine_request.attached == Attached(resumed=True)
    rest = RequestState(request, RecordingClient(), TOKENIZER, 1).rest()
    assert rest is not None and rest.replayed and rest.output_token_ids == [[9, 8]]
    assert rest.attached == Attached()
    assert parse({}, {}).engine_request.attached is None


@pytest.mark.parametrize("as_parameters", [False, True])
def test_several_sequences_are_told_apart_by_their_counts(as_parameters: bool) -> None:
    resume = {"resume_token_ids": [9, 8, 7], "resume_token_counts": [2, 0, -1, 1]}
    request = parse({"n": 4}, resume, as_parameters)
    assert request.engine_request.output_token_ids == [[9, 8], [], None, [7]]


def test_or_by_lists_of_their_own_in_a_parameter() -> None:
    request = parse({"n": 4}, {"resume_token_ids": [[9, 8], [], None, [7]]}, as_parameters=True)
    assert request.engine_request.output_token_ids == [[9, 8], [], None, [7]]


@pytest.mark.parametrize(
    ("n", "resume"),
    [
        (1, {"resume_token_ids": []}),
        (3, {"resume_token_ids": []}),
        (2, {"resume_token_ids": [], "resume_token_counts": [0, 0], "resume_cumulative_logprob": [0.0, 0.0]}),
    ],
)
def test_a_request_cut_before_its_first_token_is_a_new_one(n: int, resume: dict[str, Any]) -> None:
    request = parse({"n": n, "temperature": 1}, resume)
    assert (request.engine_request.output_token_ids, request.ends) == ([], [])


def test_the_prompt_is_not_sent_again() -> None:
    inputs = {"text_input": text("Return"), "sampling_parameters": text('{"temperature": 0}')}
    assert PARSER.parse(WireRequest(inputs)).prepend_text == "Return"
    resumed = PARSER.parse(WireRequest({**inputs, "resume_token_ids": np.array([9])}))
    assert resumed.prepend_text == ""


@pytest.mark.parametrize(
    ("sampling", "ids", "end"),
    [
        ({"max_tokens": 3}, [9, 8, 7], SequenceEnd("length")),
        ({"max_tokens": 99}, [9] * (MAX_LEN - 3), SequenceEnd("length")),
        ({"max_tokens": 9}, [9, EOS], SequenceEnd("stop", EOS)),
        ({"max_tokens": 2}, [9, EOS], SequenceEnd("stop", EOS)),
        ({"max_tokens": 9, "stop_token_ids": [8]}, [9, 8], SequenceEnd("stop", 8)),
        ({"max_tokens": 9, "ignore_eos": True}, [9, EOS], None),
        (
            {"max_tokens": 9, "ignore_eos": True, "structured_outputs": {"choice": ["a"]}},
            [9, EOS],
            SequenceEnd("stop", EOS),
        ),
        ({"max_tokens": 9}, [9, 8, 7], None),
    ],
)
def test_a_complete_output_is_known_by_its_last_token(
    sampling: dict[str, Any], ids: list[int], end: SequenceEnd | None
) -> None:
    assert parse(sampling, {"resume_token_ids": ids}).ends == [end]


@pytest.mark.parametrize(
    ("sampling", "resume", "says"),
    [
        ({}, {"resume_token_ids": [VOCAB]}, f"resume_token_ids: token id {VOCAB} is not in the vocabulary [0, "),
        ({"max_tokens": 2}, {"resume_token_ids": [9] * 3}, "has 3 tokens, more than the 2 that max_tokens and"),
        ({"max_tokens": 99}, {"resume_token_ids": [9] * 62}, "has 62 tokens, more than the 61"),
        ({}, {"resume_token_ids": [EOS, 9]}, "sequence 0 ended with stop token 2, and 1 more tokens follow"),
        ({"temperature": 1}, {"resume_token_ids": [9]}, "needs the seed of the request that began the output"),
        ({"temperature": 1, "seed": -1}, {"resume_token_ids": [9]}, "needs the seed"),
        ({"n": 2}, {"resume_token_ids": [9, 8]}, "2 token ids for n=2 sequences: give resume_token_counts"),
        ({"n": 2}, {"resume_token_ids": [9], "resume_token_counts": [1]}, "must be one count for each of n=2"),
        ({}, {"resume_token_ids": [9], "resume_token_counts": [2]}, "add up to the number of ids"),
        ({"n": 2}, {"resume_token_ids": [9], "resume_token_counts": [-2, 1]}, "must be one count for each"),
        ({"n": 2}, {"resume_token_ids": [], "resume_token_counts": [-1, -1]}, "every sequence has ended"),
        ({}, {"resume_token_counts": [1]}, "resume_token_counts without resume_token_ids: give both"),
        ({}, {"resume_token_ids": [9], "resume_cumulative_logprob": [-1.0, 2.0]}, "has 2 entries: give one for each"),
        ({}, {"resume_token_ids": [9], "resume_cumulative_logprob": [float("nan")]}, "must be a list of numbers"),
    ],
)
def test_an_output_that_cannot_be_resumed_is_refused(
    sampling: dict[str, Any], resume: dict[str, Any], says: str
) -> None:
    assert says in refusal(sampling, resume)


@pytest.mark.parametrize(
    ("sampling", "resume", "says"),
    [
        ({}, {"resume_token_ids": "soon"}, "resume_token_ids=['soon']: must be a list of token ids"),
        ({}, {"resume_token_ids": [[1], [2]]}, "has 2 lists: give one for each of n=1"),
        ({"n": 2}, {"resume_token_ids": [[1], [[2]]]}, "must be a list of token ids"),
        ({"n": 2}, {"resume_token_ids": [[1], None], "resume_token_counts": [1, -1]}, "omit one"),
        ({}, {"resume_token_ids": [True]}, "must be a list of token ids"),
        ({}, {"resume_token_ids": [10**400]}, "not in the vocabulary"),
    ],
)
def test_parameters_of_the_wrong_shape_are_refused(sampling: dict[str, Any], resume: dict[str, Any], says: str) -> None:
    assert says in refusal(sampling, resume, as_parameters=True)


def test_too_deep_a_parameter_is_refused() -> None:
    with pytest.raises(RequestError, match="must be a list of token ids"):
        PARSER.parse(WireRequest({"input_ids": np.array([5])}, {"resume_token_ids": "[" * 100_000}))


# -- the rest of the whole -----------------------------------------------------------------


def check_every_cut(
    parser: RequestParser, make_engine: Callable[[], SteppedEngine], sampling: dict[str, Any], cuts: list[int]
) -> None:
    """One after the other, clients stop listening after so many steps; what they have together is the whole."""
    inputs = {"input_ids": np.array([5, 6, 7]), "sampling_parameters": text(json.dumps(sampling))}
    n = sampling["n"]
    whole, parts = Received(n), Received(n)
    receive(parser, TOKENIZER, make_engine(), inputs, whole)
    assert whole.complete and "None" not in whole.reasons
    for number, cut in enumerate([*cuts, None]):
        if parts.complete:
            break
        resume = parts.as_inputs(tells_ends=number % 2 == 0) if any(parts.token_ids) else {}
        receive(parser, TOKENIZER, make_engine(), {**inputs, **resume}, parts, cut)
    assert (parts.texts, parts.token_ids, parts.reasons) == (whole.texts, whole.token_ids, whole.reasons)
    assert parts.logprobs == whole.logprobs
    assert parts.sums == pytest.approx(whole.sums, rel=1e-12)


tokens = st.lists(st.integers(3, VOCAB - 1), min_size=30, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(tokens, min_size=1, max_size=3),
    ends=st.lists(st.integers(0, 29), min_size=3, max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.sampled_from([[], ["e"], ["\ufffd\ufffd", "ab"]]),
    max_tokens=st.integers(1, 29),
    min_tokens=st.integers(0, 3),
)
def test_any_output_cut_anywhere_and_resumed_is_the_whole(
    script: list[list[int]], ends: list[int], cuts: list[int], stop: list[str], max_tokens: int, min_tokens: int
) -> None:
    for index, end in enumerate(ends[: len(script)]):
        script[index][end] = EOS
    sampling = {"n": len(script), "stop": stop, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0}
    sampling["min_tokens"] = min(min_tokens, max_tokens)
    check_every_cut(PARSER, lambda: ScriptEngine(script, EOS), sampling, cuts)


@pytest.fixture(scope="module")
def demo_core() -> EngineCore:
    return make_core(str(CHECKPOINT), max_num_seqs=8, max_num_batched_tokens=64)


# Long texts without a choice, and characters of several tokens each, in strings of JSON.
WORDS = {
    "json": {
        "type": "object",
        "properties": {"list of names": {"const": "日本 ☃"}, "ü": {"enum": ["ab☃c", "ab☂d", "ß"]}},
        "required": ["list of names", "ü"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 1.2, "seed": 7, "top_k": 40, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.5, "seed": 2**40, "min_p": 0.01, "bad_words": ["self"], "stop": ["\n    ", "re"]},
    {"temperature": 1.0, "seed": 3, "ignore_eos": True, "logit_bias": {"0": 9.0}},  # it is likely, and goes on
    {"temperature": 1.0, "seed": 3, "structured_outputs": WORDS},
    {"temperature": 1.0, "seed": 4, "structured_outputs": WORDS, "ignore_eos": True, "stop": ["l"]},
]


@settings(max_examples=20, deadline=None)
@given(
    sampling=st.sampled_from(SAMPLINGS),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 24),
    cuts=st.lists(st.integers(0, 9), max_size=3),
)
def test_a_real_engine_goes_on_as_if_nothing_had_happened(
    demo_core: EngineCore, sampling: dict[str, Any], n: int, max_tokens: int, cuts: list[int]
) -> None:
    """The same tokens, text, log probabilities and ends, whatever the parameters."""
    info = demo_core.info
    parser = RequestParser(
        demo_core.config, TOKENIZER, CHAT, info.max_model_len, info.vocab_size, eos_token_ids=info.eos_token_ids
    )
    sampling = {**sampling, "n": n, "max_tokens": max_tokens, "logprobs": 1}
    check_every_cut(parser, lambda: CoreEngine(demo_core), sampling, cuts)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammars_output_cut_at_any_token_and_resumed_is_the_whole(demo_core: EngineCore, ignore_eos: bool) -> None:
    """Also where one step yields several tokens, and in the middle of a character inside a string."""
    info = demo_core.info
    parser = RequestParser(
        demo_core.config, TOKENIZER, CHAT, info.max_model_len, info.vocab_size, eos_token_ids=info.eos_token_ids
    )
    sampling = {"n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 99, "ignore_eos": ignore_eos, "logprobs": 0}
    inputs = {
        "input_ids": np.array([5, 6, 7]),
        "sampling_parameters": text(json.dumps({**sampling, "structured_outputs": WORDS})),
    }
    whole, mid_character, engine = Received(2), 0, CoreEngine(demo_core)
    receive(parser, TOKENIZER, engine, inputs, whole)
    assert whole.reasons == ["stop", "stop"]
    assert [json.loads(answer)["list of names"] for answer in whole.texts] == ["日本 ☃"] * 2
    for cut in range(1, max(map(len, whole.token_ids))):
        parts = Received(2)
        parts.token_ids = [ids[:cut] for ids in whole.token_ids]
        parts.texts = [TOKENIZER.decode(ids).rstrip("\ufffd") for ids in parts.token_ids]  # as a stream shows them
        mid_character += sum(TOKENIZER.decode(ids).endswith("\ufffd") for ids in parts.token_ids)
        parts.reasons = ["stop" if len(ids) <= cut else "None" for ids in whole.token_ids]
        receive(parser, TOKENIZER, engine, {**inputs, **parts.as_inputs(tells_ends=False)}, parts)
        assert (parts.texts, parts.token_ids, parts.reasons) == (whole.texts, whole.token_ids, whole.reasons), cut
    assert mid_character > 5


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 60) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(ids=values, counts=values, sums=values, n=st.integers(1, 3))
def test_any_value_is_accepted_or_refused(ids: Any, counts: Any, sums: Any, n: int) -> None:
    resume = {"resume_token_ids": ids, "resume_token_counts": counts, "resume_cumulative_logprob": sums}
    try:
        request = parse({"n": n, "max_tokens": 5}, resume, as_parameters=True)
    except RequestError as error:
        assert error.code == "INVALID_ARG"
        assert len(error.message) < 500
        return
    outputs = request.engine_request.output_token_ids
    assert not outputs or (len(outputs) == len(request.ends) == n and any(outputs))
    assert all(0 <= token < VOCAB for output in outputs for token in output or ())
