"""Answers that call tools: what the grammar of a list of tools lets through, in each format."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from inflight.frontend.request.structured_outputs import structured_outputs
from inflight.grammars.base import MaskJob, mask_words
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.spec import GrammarSpec
from inflight_client import tool_calls
from inflight_gateway.tool_parsers import CallArguments, CallStart, new_parser

from .conftest import DEMO, EOS
from .test_answers import Answers, grammar_params
from .test_answers import answers as answers  # a fixture

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"name": "now"},
]
ARGUMENTS = '{"city": "Oslo", "days": 3}'
CALLS = {
    "hermes": [
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "llama3": [f'{{"name": "weather", "parameters": {ARGUMENTS}}}', '{"name": "now", "parameters": {}}'],
    "mistral": [f'{{"name": "weather", "arguments": {ARGUMENTS}}}', '{"name": "now", "arguments": {}}'],
    "mistral_args": [f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "[TOOL_CALLS]now[ARGS]{}"],
    "pythonic": ['weather(city="Oslo", days=3)', "now()"],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
}
WITH_ARGUMENT = {
    "pythonic": "now(a=1)",
    "qwen3_coder": CALLS["qwen3_coder"][1].replace("</f", "<parameter=a>\n1\n</parameter>\n</f"),
}
SEPARATORS = {
    "hermes": "\n",
    "llama3": "; ",
    "mistral": ", ",
    "mistral_args": "",
    "pythonic": ", ",
    "qwen3_coder": "\n",
}


def joined(format: str, *calls: str) -> str:
    text = SEPARATORS.get(format, "\n").join(calls)
    if format == "pythonic":
        return f"[{text}]"
    return f"[TOOL_CALLS] [{text}]" if format == "mistral" else text


def spec_of(format: Any, **options: Any) -> GrammarSpec:
    spec = structured_outputs("test", tool_calls(TOOLS, format, **options))
    assert spec is not None
    return spec


def accepts(grammars: GuidanceGrammars, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """Whether the text is a whole answer."""
    deadline = time.monotonic() + 60
    while (found := grammars.outcome(spec)) is None:
        assert time.monotonic() < deadline
    assert found == ""
    sequence = grammars.new(spec)
    sequence.advance(tokenizer.encode(text, add_special_tokens=False).ids)
    if sequence.error:
        return False
    bitmask = np.empty((1, mask_words(tokenizer.get_vocab_size())), dtype=np.int32)
    grammars.fill([MaskJob(sequence, 0, [])], bitmask)
    return bool(bitmask[0, EOS // 32] >> EOS % 32 & 1)


@pytest.fixture(scope="module", params=["text", "ordinary token", "special token"])
def marked(request: pytest.FixtureRequest) -> tuple[GuidanceGrammars, Tokenizer]:
    """Marks of calls are spelled out, or a token of their own, as in Qwen's and in Mistral's vocabularies."""
    tokenizer = Tokenizer.from_file(str(DEMO))
    if request.param != "text":
        special = request.param == "special token"
        marks = [AddedToken(mark, special=special, normalized=False) for mark in ("<tool_call>", "[TOOL_CALLS]")]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks)
    return GuidanceGrammars(tokenizer.to_str, tokenizer.get_vocab_size(), [EOS]), tokenizer


@pytest.mark.parametrize("format", CALLS)
def test_text_and_calls_are_let_through_and_nothing_else(
    marked: tuple[GuidanceGrammars, Tokenizer], format: str
) -> None:
    weather, now = CALLS[format]
    auto, required = spec_of(format), spec_of(format, choice="required")
    named, single = spec_of(format, choice="now"), spec_of(format, choice="required", parallel=False)

    def ok(spec: GrammarSpec, text: str) -> bool:
        return accepts(*marked, spec, text)

    assert ok(auto, "It is sunny.") and ok(auto, joined(format, weather)) and ok(auto, joined(format, weather, now))
    if format not in ("llama3", "pythonic"):
        assert ok(auto, "Let me look. " + joined(format, weather))
    assert ok(required, joined(format, weather)) and ok(required, joined(format, now, weather))
    assert not ok(required, "It is sunny.") and not ok(required, "")
    assert ok(named, joined(format, now)) and not ok(named, joined(format, weather))
    assert ok(single, joined(format, now)) and not ok(single, joined(format, now, now))
    for wrong in (
        joined(format, weather.replace("Oslo", "Paris")),
        joined(format, weather.replace("3", "9")),
        joined(format, weather.replace("weather", "whether")),
        joined(format, WITH_ARGUMENT.get(format, now.replace("{}", '{"a": 1}'))),
        joined(format, weather)[:-1],
    ):
        assert not ok(auto, wrong) and not ok(required, wrong), wrong


@pytest.mark.parametrize("format", CALLS)
def test_generated_calls_have_arguments_that_validate(answers: Answers, format: str) -> None:
    options = {"max_tokens": 300, "temperature": 0.7}
    found, failed = answers.run(
        [([5], grammar_params(spec_of(format, choice="weather"), seed, **options)) for seed in range(12)]
    )
    assert not failed
    stopped = 0
    for token_ids, reason in found.values():
        if reason == "stop":
            stopped += 1
            parser = new_parser(format, {"weather": WEATHER})
            events = [*parser.feed(answers.text(token_ids)), *parser.finish()]
            assert isinstance(events[0], CallStart) and events[0].name == "weather"
            assert isinstance(events[1], CallArguments)
            jsonschema.validate(json.loads(events[1].text), WEATHER)
    assert stopped >= 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": []}, "tools is empty"),
        ({"tools": [{"function": {}}]}, "has no name"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "two tools are named 'a'"),
        ({"tools": TOOLS, "choice": "later"}, "choice='later': must be auto, required, or one of weather, now"),
        (
            {"tools": TOOLS, "format": "xml"},
            "format='xml': must be one of hermes, llama3, mistral, mistral_args, pythonic, qwen3_coder",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        tool_calls(**arguments)
    assert message in str(caught.value)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "home": {"$ref": "#/$defs/place"},
        "pets": {"enum": ["cat", 2]},
    },
    "required": ["home"],
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (
            "qwen3_coder",
            [
                '<parameter=home>\n{"city": "X"}\n</parameter>\n',
                '<parameter=name>\nA "b"\n\nc\n</parameter>\n<parameter=home>\n{"city": ""}\n</parameter>\n'
                "<parameter=pets>\n2\n</parameter>\n",
            ],
            ["", "<parameter=home>\n5\n</parameter>\n", "<parameter=name>\nA\n</parameter>\n"],
        ),
        ("pythonic", ['home={"city": "X"}', 'home={"city": "X"}, name="a", age=null'], ["", "home=5", 'name="a"']),
    ],
)
def test_optional_arguments_and_references(
    marked: tuple[GuidanceGrammars, Tokenizer], format: Any, good: list[str], bad: list[str]
) -> None:
    spec = structured_outputs("test", tool_calls([{"name": "f", "parameters": PERSON}], format, "required"))
    loose = structured_outputs("test", tool_calls([{"name": "f", "parameters": {"type": "object"}}], format, "f"))
    assert spec is not None and loose is not None
    call = "[f({})]" if format == "pythonic" else "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
    for arguments in (*good, *bad):
        text = call.replace("{}", arguments)
        assert accepts(*marked, spec, text) == (arguments in good), arguments
        assert accepts(*marked, loose, text)


def test_a_name_that_python_does_not_have() -> None:
    with pytest.raises(ValueError, match="tool 'f': 'user-id' cannot be the name of an argument in Python"):
        tool_calls([{"name": "f", "parameters": {"properties": {"user-id": {}}}}], "pythonic")
