"""From a `GrammarSpec` to the language of llguidance.  Runs where grammars are compiled, beside the steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inflight.grammars.lark_size import check_lark
from inflight.grammars.regex_size import check_regex
from inflight.grammars.schemas import checked_schema
from inflight.grammars.spec import GrammarSpec
from inflight.grammars.structural_tag import literal, structural_tag_grammar

__all__ = ["guidance_grammar"]

# Between the tokens of JSON.  Any whitespace is valid, and a model that once began it might never end it: so there is a
# bound, far above what indentation takes.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# Without `u`, so that a name has one spelling.  llguidance compares the names that a schema gives with the bytes of the
# output: `\u0061ge` would be a name that only `additionalProperties` speaks of, and escape the schema of `age`.
_ESCAPES = 'nrbtf\\"'


def guidance_grammar(spec: GrammarSpec, special_tokens: Mapping[str, int], num_tokens: int) -> str:
    """The text from which an `LLMatcher` is made.

    Args:
        special_tokens: token ids by name; where a literal contains a name, it means the token.
        num_tokens: the first ones, which a grammar may name by their ids.

    Raises:
        ValueError: not what its kind says it is, or a demand that could not be enforced.
    """
    from llguidance import LLMatcher, grammar_from

    check_regex(spec.whitespace or "", "whitespace_pattern")
    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            checked_schema(json.loads(spec.text), spec.additional_properties), overrides=json_options(spec)
        )
    if spec.kind == "regex":
        check_regex(spec.text)
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(literal(text, special_tokens) for text in json.loads(spec.text))
        )
    if spec.kind == "structural_tag":
        return structural_tag_grammar(
            json.loads(spec.text), json_options(spec), spec.additional_properties, special_tokens
        )
    return grammar_from("grammar", _with_escapes(spec, num_tokens))


def _with_escapes(spec: GrammarSpec, num_tokens: int) -> str:
    """A grammar whose JSON Schemas are checked, and write names in one spelling; their other options stay.

    Raises:
        ValueError: as `check_lark` and `checked_schema`.
    """
    pieces, position = [], 0
    for found in check_lark(spec.text, num_tokens):
        schema = dict(found.value)
        options = schema.pop("x-guidance", {})
        schema = checked_schema(schema, spec.additional_properties)
        if isinstance(options, dict):  # else llguidance says what is wrong with it
            options = {"json_allowed_escapes": _ESCAPES, **options}
        pieces += [spec.text[position : found.start], json.dumps({**schema, "x-guidance": options})]
        position = found.end
    return "".join([*pieces, spec.text[position:]])


def json_options(spec: GrammarSpec) -> Any:
    """How llguidance writes JSON."""
    if spec.whitespace == "":
        return {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
    whitespace = _WHITESPACE if spec.whitespace is None else spec.whitespace
    return {"whitespace_pattern": whitespace, "json_allowed_escapes": _ESCAPES}
