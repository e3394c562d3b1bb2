"""Constraints on the output, in the forms of vLLM's and TensorRT-LLM's clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

import inflight
from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.errors import RequestError
from inflight.frontend.request import structured_outputs as module
from inflight.frontend.request.limits import Limits
from inflight.frontend.request.sampling_keys import request_keys
from inflight.grammars.spec import GrammarSpec

SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))


def keys(**values: Any) -> SamplingParams:
    limits = Limits(EngineConfig(model="m"), 100)
    return request_keys([values], None, limits, 16).params  # type: ignore[arg-type]


def rejected(**values: Any) -> str:
    with pytest.raises(RequestError) as caught:
        keys(**values)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"json": SCHEMA}, GrammarSpec("json_schema", TEXT)),
        ({"json": json.dumps(SCHEMA)}, GrammarSpec("json_schema", TEXT)),
        ({"json": SCHEMA, "disable_any_whitespace": True}, GrammarSpec("json_schema", TEXT, "")),
        ({"json": SCHEMA, "whitespace_pattern": " ?"}, GrammarSpec("json_schema", TEXT, " ?")),
        ({"json": SCHEMA, "disable_additional_properties": True}, GrammarSpec("json_schema", TEXT, None, False)),
        ({"json_object": True}, GrammarSpec("json_schema", '{"type":"object"}')),
        ({"regex": "a+", "backend": "outlines", "disable_fallback": True}, GrammarSpec("regex", "a+")),
        ({"choice": ["b", "a", "b"]}, GrammarSpec("choice", '["b", "a"]')),
        ({"grammar": 'root ::= "x"'}, GrammarSpec("grammar", 'root ::= "x"')),
        ({"structural_tag": '{"format": {"type": "any_text"}}'},
         GrammarSpec("structural_tag", '{"format":{"type":"any_text"}}')),
        ({"json": None, "json_object": False, "regex": "x"}, GrammarSpec("regex", "x")),
        ({}, None),
    ],
)  # fmt: skip
def test_vllms_object_and_its_json_text(value: dict[str, Any], expected: GrammarSpec | None) -> None:
    for key in ("structured_outputs", "guided_decoding"):
        assert keys(**{key: value}).grammar == keys(**{key: json.dumps(value)}).grammar == expected


@pytest.mark.parametrize(
    ("guide_type", "guide", "expected"),
    [
        ("json", None, GrammarSpec("json_schema", "{}")),
        ("json_schema", json.dumps(SCHEMA), GrammarSpec("json_schema", TEXT)),
        ("regex", "a+", GrammarSpec("regex", "a+")),
        ("ebnf_grammar", 'root ::= "x"', GrammarSpec("grammar", 'root ::= "x"')),
        ("structural_tag", '{"format":{}}', GrammarSpec("structural_tag", '{"format":{}}')),
    ],
)
def test_tensorrt_llms_guide(guide_type: str, guide: str | None, expected: GrammarSpec) -> None:
    assert keys(guided_decoding_guide_type=guide_type, guided_decoding_guide=guide).grammar == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"structured_outputs": "{"}, "structured_outputs: not valid JSON"),
        ({"structured_outputs": [1]}, "structured_outputs=[1]: must be an object with one of json, json_object"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs: unknown key 'jsn'; known keys: json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs has json and regex: give one"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs: json=5: must be an object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs: json: not valid JSON"),
        ({"structured_outputs": {"json": {"a": "\ud800"}}}, "must be an object, or the JSON text of one"),
        ({"structured_outputs": {"json_object": 1}}, "json_object=1: must be true or false"),
        ({"structured_outputs": {"regex": ""}}, "regex='': must be a string that is not empty"),
        ({"structured_outputs": {"regex": "\ud800"}}, "must be a string that is not empty"),
        ({"structured_outputs": {"choice": []}}, "choice=[]: must be a list of strings that is not empty"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "must be a list of strings that is not empty"),
        ({"structured_outputs": {"grammar": "x" * (module.MAX_GRAMMAR_CHARS + 1)}}, "at most 131072 are allowed"),
        ({"structured_outputs": "x" * (module.MAX_GRAMMAR_CHARS + 1)}, "at most 131072 are allowed"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": "x"}}, "give one"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}}, "must be true or false"),
        ({"guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type='yaml': must be one of json, json_schema"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide_type='regex' needs guided_decoding_guide"),
        ({"guided_decoding_guide": "x"}, "guided_decoding_guide_type=None: must be one of"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "both constrain the output"),
    ],
)  # fmt: skip
def test_an_invalid_form_is_refused(values: dict[str, Any], message: str) -> None:
    assert message in rejected(**values)


def test_nesting_beyond_pythons_depth_is_refused() -> None:
    assert "structured_outputs" in rejected(structured_outputs='{"json":' + '{"items":' * 20_000 + "{}" + "}" * 20_001)


def test_the_python_interface_takes_the_same_keys() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    assert inflight.grammar(json=Model) == inflight.grammar(json=SCHEMA) == GrammarSpec("json_schema", TEXT)
    with pytest.raises(ValueError, match="unknown key 'jsn'"):
        inflight.grammar(jsn={})
    with pytest.raises(ValueError, match="give one of json"):
        inflight.grammar()
