"""Values that a model wrote as bare text, as JSON of the type that the tool's schema asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from inflight_client.schemas import json_types, json_types_of

__all__ = ["is_text", "json_text", "parsed_json", "property_schema", "typed_value"]

_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


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
    return json_types(schema, root) == {"string"}


def typed_value(text: str, schema: Any, root: Any) -> str:
    """JSON of the value that the schema allows and that `text` most plainly spells; a string if it is none.

    Args:
        text: as the model wrote it, without quotes around strings.
        schema: of the value; anything that says no type means a string.
        root: where references begin.
    """
    types = json_types(schema, root)
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word is not None and ("null" if word == "null" else "boolean") in types:
        return word
    found = parsed_json(bare)
    if found is not None and json_types_of(found) & types and not isinstance(found, (str, bool)):
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
