"""JSON Schemas, before llguidance reads them: what it does not enforce is refused, or said in other keywords."""

from __future__ import annotations

import copy
import re
from typing import Any

from inflight.grammars.closed_objects import close_objects
from inflight.grammars.regex_size import check_regex
from inflight.grammars.string_formats import STRING_FORMATS
from inflight.grammars.subschemas import all_schemas

__all__ = ["checked_schema"]

# Keywords that llguidance does not know, and the values with which they ask nothing.
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
}
_NEEDS_U_ESCAPE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")


def checked_schema(schema: Any, additional_properties: bool) -> dict[str, Any]:
    """A schema that llguidance enforces, or refuses itself.

    Args:
        additional_properties: whether objects may have properties that their schema does not name, where it does not
            say.

    Raises:
        ValueError: not a schema, or a demand that would be ignored.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("the JSON Schema must be an object, or true")
    schema = copy.deepcopy(schema)
    for part in all_schemas(schema):
        if "x-guidance" in part:
            raise ValueError("x-guidance is not supported in a schema: use whitespace_pattern and the other options")
        _check_minimum(part)
        _check_values(part)
        _check_patterns(part)
        _drop_what_asks_nothing(part)
        _enforce_format(part)
    if not additional_properties:
        close_objects(schema)
    return schema


def _check_minimum(part: dict[str, Any]) -> None:
    """llguidance counts properties, and lets one that the schema does not name come twice."""
    least, required = part.get("minProperties"), part.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise ValueError(
            f"minProperties={least} is not supported where fewer properties are required: list them under required"
        )


def _check_values(part: dict[str, Any]) -> None:
    """llguidance would leave out a value that it cannot write without `\\u` escapes; see `formats`."""
    for key in ("enum", "const"):
        for value in _strings(part.get(key)):
            if _NEEDS_U_ESCAPE.search(value):
                raise ValueError(
                    f"{key}: {value[:80]!r} has a control character, and JSON is written without \\u escapes: use "
                    "backspace, form feed, newline, carriage return and tab alone"
                )


def _strings(value: Any) -> list[str]:
    """Every string in a value, names of properties aside."""
    found, queue = [], [value]
    while queue:
        value = queue.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, (dict, list)):
            queue.extend(value.values() if isinstance(value, dict) else value)
    return found


def _check_patterns(part: dict[str, Any]) -> None:
    named = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            check_regex(pattern, f"the pattern {pattern[:80]!r}")


def _drop_what_asks_nothing(part: dict[str, Any]) -> None:
    for key, values in _ASKS_NOTHING.items():
        if key in part and any(part[key] is value or part[key] == value == {} for value in values):
            del part[key]


def _enforce_format(part: dict[str, Any]) -> None:
    """`format` in keywords that llguidance combines with the others."""
    name = part.get("format")
    if isinstance(name, str) and name in STRING_FORMATS and isinstance(part.get("allOf", []), list):
        del part["format"]
        part["allOf"] = [*part.get("allOf", []), STRING_FORMATS[name]]
