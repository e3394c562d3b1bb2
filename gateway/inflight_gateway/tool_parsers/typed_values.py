"""Values that a model wrote as bare text, as JSON of the type that the tool's schema asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["is_text", "json_text", "parsed_json", "property_schema", "typed_value"]

_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_MAX_DEPTH = 16  # of references and alternatives in a schema
_ALL = {"string", "number", "integer", "boolean", "object", "array", "null"}


def json_text(value: Any) -> str:
    """JSON that UTF-8 can encode.

    Raises:
        ValueError, TypeError, RecursionError: JSON has no such value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return json.dumps(value, allow_nan=False)
    return text


def property_schema(parameters: Any, name: str) -> tuple[Any, Any]:
    """Schema of an argument, and the schema in which its references are looked up."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return (properties.get(name) if isinstance(properties, Mapping) else None), parameters


def is_text(schema: Any, root: Any) -> bool:
    """Whether a value can only be a string, so that it can be passed on before it is complete."""
    return _types(schema, root, 0) == {"string"}


def typed_value(text: str, schema: Any, root: Any) -> str:
    """JSON of the value that the schema allows and that `text` most plainly spells; a string if it is none.

    Args:
        text: as the model wrote it, without quotes around strings.
        schema: of the value; anything that says no type means a string.
        root: where references begin.
    """
    types = _types(schema, root, 0)
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word is not None and ("null" if word == "null" else "boolean") in types:
        return word
    found = parsed_json(bare)
    if found is not None and _type_of(found) & types and not isinstance(found, (str, bool)):
        return bare
    if isinstance(found, str) and "string" not in types:
        return json_text(found)
    return json_text(text)


def parsed_json(text: str) -> Any:
    """The value of a JSON text; None if it is not valid (or null)."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _type_of(value: Any) -> set[str]:
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    kinds = {int: {"number", "integer"}, dict: {"object"}, list: {"array"}, str: {"string"}}
    return kinds.get(type(value), set())


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    """The JSON types that a schema allows; strings if it says nothing."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {"string"}
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds} & _ALL or {"string"}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)} & _ALL or {"string"}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(reference, root), root, depth + 1)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        return set().union(*(_type_of_choice(choice) for choice in choices))
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            return set().union(*(_types(part, root, depth + 1) for part in parts[:_MAX_DEPTH]))
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else {"string"}


def _type_of_choice(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    return {"boolean"} if isinstance(value, bool) else _type_of(value)


def _resolved(reference: str, root: Any) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
