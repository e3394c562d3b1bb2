"""No spelling of a property's name leads around its schema: what the grammar accepts validates."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.grammars.formats import guidance_grammar
from inflight.grammars.spec import GrammarSpec

from .conftest import VOCAB, ByteGrammar

NAMES = ["age", "prénom", "été", 'q"', "a\\b", "a\nb", "x\x1fy", "☃😀", "p1", "del\x7f"]
OTHERS = ["other", "p2", "ñ", "e\u0301te\u0301", ""]
SHORT = {"\n": "\\n", '"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b"}
VALUES = st.sampled_from([0, 42, -1, "ab", "abcdefgh", None, True, {}, [1]])
VALUE_SCHEMAS = st.sampled_from(
    [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 5}, {"type": "null"}, True, False]
)


def spelled(draw: Any, text: str) -> str:
    """The text as a JSON string, each character in one of its spellings."""
    return '"' + "".join(draw(st.sampled_from(spellings(character))) for character in text) + '"'


def spellings(character: str) -> list[str]:
    units = [character.encode("utf-16-be")[i : i + 2].hex() for i in range(0, len(character.encode("utf-16-be")), 2)]
    escaped = ["".join(f"\\u{unit}" for unit in units), "".join(f"\\u{unit.upper()}" for unit in units)]
    plain = SHORT.get(character, character)
    return [plain, plain, plain, plain, *escaped]


@st.composite
def objects(draw: Any) -> tuple[dict[str, Any], str]:
    """A schema, and the text of an object that may fit it."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    schema: dict[str, Any] = {"type": "object", "properties": {name: draw(VALUE_SCHEMAS) for name in names[1:]}}
    schema["required"] = names[: draw(st.integers(0, len(names)))]
    if draw(st.booleans()):
        schema["patternProperties"] = {"^p": {"type": "integer"}}
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(VALUE_SCHEMAS)
    ordered = [*schema["properties"], *(name for name in schema["required"] if name not in schema["properties"])]
    given_names = [name for name in ordered if draw(st.integers(0, 3))]
    given_names += draw(st.lists(st.sampled_from([*OTHERS, *names]), max_size=2))
    pairs = [f"{spelled(draw, name)}:{json.dumps(draw(VALUES))}" for name in given_names]
    return schema, "{" + ",".join(pairs) + "}"


@lru_cache(256)
def compiled(schema: str, whitespace: str = "") -> ByteGrammar | None:
    """None if the schema has no answer."""
    grammar = ByteGrammar(guidance_grammar(GrammarSpec("json_schema", schema, whitespace), {}, VOCAB))
    assert not grammar.error or "nsatisfiable" in grammar.error
    return None if grammar.error else grammar


def test_an_object_that_is_accepted_validates_however_its_names_are_spelled() -> None:
    accepted = 0

    @given(objects())
    @settings(max_examples=5 * settings().max_examples)
    def check(drawn: tuple[dict[str, Any], str]) -> None:
        nonlocal accepted
        schema, text = drawn
        grammar = compiled(json.dumps(schema))
        if grammar is not None and grammar.accepts(text):
            accepted += 1
            jsonschema.validate(json.loads(text), schema)

    check()
    assert accepted > settings().max_examples // 4  # about one in five of those drawn is; so this is no matter of luck


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"prénom": {"maxLength": 5}}}, '{"pr\\u00e9nom":"too long"}'),
        ({"properties": {"prénom": {"maxLength": 5}}}, '{"prénom":"short","pr\\u00E9nom":"too long"}'),
        ({"required": ["é"], "additionalProperties": {"type": "integer"}}, '{"é":1,"\\u00e9":2}'),
        ({"patternProperties": {"^é": {"type": "string"}}}, '{"\\u00e9":1}'),
        ({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": {"const": 1}}, '{"\\u0061":1}'),
        ({"properties": {"a\x1f": {"type": "string"}}}, '{"a\\u001F":1}'),
    ],
)  # fmt: skip
def test_a_second_spelling_of_a_name_is_not_accepted(schema: dict[str, Any], text: str) -> None:
    grammar = compiled(json.dumps({"type": "object", **schema}))
    assert grammar is not None and not grammar.accepts(text)


@pytest.mark.parametrize("option", [{}, {"whitespace_flexible": False}])
def test_the_json_of_a_lark_grammar_has_one_spelling_of_a_name(option: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        **({"x-guidance": option} if option else {}),
    }
    text = (
        f'start: "%json {{" part // %json {{\npart: %json {json.dumps(schema, indent=1)} ">" | %json  {{"const": "é"}}'
    )
    grammar = ByteGrammar(guidance_grammar(GrammarSpec("grammar", text), {}, VOCAB))
    assert not grammar.error
    assert grammar.accepts('%json {{"age":1}>') and grammar.accepts('%json {{"é":"\u00e9"}>')
    assert grammar.accepts('%json {"é"')
    assert not grammar.accepts('%json {{"\\u0061ge":"x"}>')
    assert grammar.accepts('%json {{"age": 1}>') is not bool(option)


def test_the_json_behind_a_grammar_in_a_grammar_has_one_spelling_of_a_name() -> None:
    schema = json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}})
    text = f'start: "<" inner ">" | last\ninner: %lark {{\nstart: %json {schema}\n}}\nlast: %json {schema}\n'
    grammar = ByteGrammar(guidance_grammar(GrammarSpec("grammar", text), {}, VOCAB))
    assert grammar.accepts('<{"age":1}>') and grammar.accepts('{"age":1}')
    assert not grammar.accepts('<{"\\u0061ge":"x"}>') and not grammar.accepts('{"\\u0061ge":"x"}')


def test_the_json_of_a_lark_grammar_is_checked() -> None:
    for schema, reason in [({"minProperties": 9}, "minProperties"), ({"enum": ["\x01"]}, "control character")]:
        with pytest.raises(ValueError, match=reason):
            guidance_grammar(GrammarSpec("grammar", f"start: %json {json.dumps(schema)}"), {}, VOCAB)


def test_names_and_values_keep_every_character_that_is_no_control_character() -> None:
    grammar = compiled(json.dumps({"type": "object", "properties": {"x\x1f": {"type": "string"}}}))
    assert grammar is not None
    assert grammar.accepts('{"x\\u001f":"é☃😀 \\" \\\\ \\n\\t\\r\\b\\f / \u2028"}')
    assert grammar.accepts('{"prénom":"\u00a0"}') and grammar.accepts('{"a\\nb":1}')
