"""JSON Schemas that llguidance alone would refuse, enforce in part, or leave without an answer."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.grammars.formats import guidance_grammar
from inflight.grammars.schemas import checked_schema
from inflight.grammars.spec import GrammarSpec

from .conftest import VOCAB, ByteGrammar

OBJECT = {"type": "object"}
A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "string"}}}


def grammar(schema: Any, additional_properties: bool = True) -> ByteGrammar:
    spec = GrammarSpec("json_schema", json.dumps(schema), "", additional_properties)
    made = ByteGrammar(guidance_grammar(spec, {}, VOCAB))
    assert not made.error
    return made


# -- formats ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dates() -> ByteGrammar:
    return grammar({"format": "date"})


@given(
    st.one_of(st.integers(0, 9999), st.sampled_from([1900, 2000, 2020, 2021, 2100, 2400])),
    st.one_of(st.integers(0, 13), st.just(2)),
    st.one_of(st.integers(0, 32), st.integers(28, 31)),
)
@settings(max_examples=600, deadline=None)
def test_a_date_is_accepted_exactly_if_it_exists(dates: ByteGrammar, year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        datetime.date(year, month, day)
    except ValueError:
        assert not dates.accepts(f'"{text}"')
    else:
        assert dates.accepts(f'"{text}"')


LONG_HOST = ".".join(["a" * 63] * 3) + "." + "b" * 61  # 253 characters


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", ["12:00:59Z", "00:00:00.125+23:59", "23:59:59z"], ["12:00:60Z", "24:00:00Z", "12:00:00", "1:00:00Z"]),
        ("date-time", ["2020-02-29T12:00:00Z", "0001-01-01t00:00:00.5-01:30"],
         ["2021-02-29T12:00:00Z", "2020-02-29T12:00:60Z", "2020-02-29", "0000-01-01T00:00:00Z"]),
        ("hostname", ["a", "a-b.c3", "a--b", "abc--d", "a" * 63, LONG_HOST],
         ["", "xn--a", "ab--c.d", "-a", "a-", "a..b", "a.", "a" * 64, LONG_HOST + "b"]),
        ("email", ["a.b+c@d-e.fr", "a@[127.0.0.1]", "a@" + LONG_HOST[:252]],
         ["a@", "@b", "a..b@c", "a@xn--b", "a@[1.2.3.256]", "a@" + LONG_HOST, "a@" + "b" * 64]),
    ],
)  # fmt: skip
def test_a_format_admits_only_what_exists(name: str, good: list[str], bad: list[str]) -> None:
    made = grammar({"type": "string", "format": name})
    assert [text for text in good if not made.accepts(f'"{text}"')] == []
    assert [text for text in bad if made.accepts(f'"{text}"')] == []


def test_a_format_and_the_other_keywords_of_a_string_hold_together() -> None:
    made = grammar(
        {"type": "string", "format": "hostname", "pattern": "^x", "maxLength": 4, "allOf": [{"minLength": 2}]}
    )
    texts = ["x", "xy", "ay", "xyzab", "x.y", "x-"]
    assert [text for text in texts if made.accepts(f'"{text}"')] == ["xy", "x.y"]
    assert grammar({"type": ["integer", "string"], "format": "date"}).accepts("7")


# -- keywords --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords",
    [{"uniqueItems": False}, {"propertyNames": True}, {"propertyNames": {}}, {"unevaluatedItems": True},
     {"unevaluatedProperties": {}}, {"dependentRequired": {}}, {"dependentSchemas": {}}, {"not": False}],
    ids=repr,
)  # fmt: skip
def test_a_keyword_that_asks_nothing_is_accepted_everywhere(keywords: dict[str, Any]) -> None:
    for schema in (keywords, {"items": {"anyOf": [keywords]}}, {"$ref": "#/x/y~1z", "x": {"y/z": keywords}}):
        assert grammar(schema).accepts("[1,1]")


@pytest.mark.parametrize("name", ["x-guidance", "uniqueItems", "format", "properties", "minProperties", "$ref", "enum"])
def test_a_property_may_be_named_like_a_keyword(name: str) -> None:
    for more in (True, False):
        made = grammar({**OBJECT, "properties": {name: {**OBJECT, **A}}}, additional_properties=more)
        assert made.accepts(json.dumps({name: {"a": 1}}, separators=(",", ":")))
        assert not made.accepts(json.dumps({name: {"a": "x"}}, separators=(",", ":")))
        assert made.accepts('{"other":1}') is made.accepts('{"additionalProperties":1}') is more
    made = grammar({**OBJECT, "properties": {"uniqueItems": False}})
    assert made.accepts("{}") and not made.accepts('{"uniqueItems":1}')


def test_a_value_that_needs_another_escape_is_refused_by_name() -> None:
    for schema in ({"enum": ["a", "\x1b[0m"]}, {"items": {"const": {"a": ["\x7f"]}}}):
        with pytest.raises(ValueError, match="has a control character"):
            checked_schema(schema, True)
    assert grammar({"enum": ["\n\r\t\b\f"]}).accepts('"\\n\\r\\t\\b\\f"')


# -- objects with only the properties that are named -----------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ['{"a":1}', "{}"], ['{"c":1}']),
        ({"allOf": [A, B]}, ["{}", '{"a":1,"b":"x"}'], ['{"a":1,"c":1}', '{"a":"x"}']),
        ({"allOf": [A, {"allOf": [B]}]}, ['{"a":1,"b":"x"}'], ['{"c":1}', '{"b":1}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":"x"}'], ['{"a":1,"b":"x"}', '{"c":1}']),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, ['{"a":1,"b":"x"}', '{"a":1}'], ['{"a":1,"c":1}', '{"b":1}']),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a":1}'], ['{"c":1}']),
        ({**B, "$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"b":"x","a":1}'], ['{"c":1}', '{"a":"x"}']),
        ({"properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [{"$ref": "#/$defs/A"}, B]}}, "$defs": {"A": A}},
         ['{"x":{"a":1},"y":{"a":1,"b":"x"}}'], ['{"x":{"a":1,"b":"x"}}', '{"y":{"c":1}}', '{"x":{"c":1}}']),
        ({**B, "properties": {"child": {"allOf": [{"$ref": "#"}]}, **B["properties"]}},
         ['{"child":{"child":{"b":"x"}}}'], ['{"child":{"c":1}}', '{"child":{"child":{"c":1}}}']),
        ({"allOf": [{"patternProperties": {"^p": {"const": 1}}}, A]}, ['{"a":1,"p1":1}'], ['{"p":2}', '{"c":1}']),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a":1,"b":"x","c":1}'], ['{"a":"x"}']),
        ({"items": A}, ['[{"a":1}]', "[[]]"], ['[{"c":1}]']),
    ],
)  # fmt: skip
def test_only_named_properties(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    made = grammar(schema, additional_properties=False)
    for text in good:
        assert made.accepts(text), text
        jsonschema.validate(json.loads(text), schema)
    assert [text for text in bad if made.accepts(text)] == []


def test_schemas_that_are_joined_in_too_many_ways_are_refused() -> None:
    names = [f"n{number}" for number in range(101)]
    schema = {"$defs": dict.fromkeys(names, A), "allOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    with pytest.raises(ValueError, match="join more than 100 schemas"):
        checked_schema(json.loads(json.dumps(schema)), False)
    assert checked_schema(json.loads(json.dumps(schema)), True)
