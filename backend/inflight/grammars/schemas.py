"""JSON Schemas, before llguidance reads them: what it would not enforce is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

__all__ = ["checked_schema"]

_NOT_SCHEMAS = {"enum", "const", "default", "examples"}


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
    for part in _parts(schema):
        if "x-guidance" in part:
            raise ValueError("x-guidance is not supported in a schema: use whitespace_pattern and the other options")
        _check_minimum(part)
        if not additional_properties and _names_properties(part):
            part.setdefault("additionalProperties", False)
    return schema


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object inside a schema that is, or looks like, a schema; the whole one first."""
    queue = [schema]
    while queue:
        part = queue.pop()
        if isinstance(part, dict):
            yield part
            queue.extend(value for key, value in part.items() if key not in _NOT_SCHEMAS)
        elif isinstance(part, list):
            queue.extend(part)


def _check_minimum(part: dict[str, Any]) -> None:
    """llguidance counts properties, and lets one that the schema does not name come twice."""
    least, required = part.get("minProperties"), part.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise ValueError(
            f"minProperties={least} is not supported where fewer properties are required: list them under required"
        )


def _names_properties(part: dict[str, Any]) -> bool:
    return isinstance(part.get("properties"), dict) or isinstance(part.get("patternProperties"), dict)
