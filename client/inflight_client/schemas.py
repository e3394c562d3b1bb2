"""JSON Schemas of Python types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["json_schema_of", "json_types", "json_types_of"]

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_MAX_PARTS = 256  # of a schema; it can refer to itself


def json_schema_of(described: Any) -> Any:
    """The schema of a pydantic model or dataclass; a mapping or JSON text is returned unchanged.

    Raises:
        TypeError: none of these, or a dataclass while pydantic, which reads its types, is missing.
    """
    if isinstance(described, (Mapping, str)):
        return described
    if hasattr(described, "model_json_schema"):
        return described.model_json_schema()
    if isinstance(described, type) and dataclasses.is_dataclass(described):
        try:
            from pydantic import TypeAdapter
        except ImportError:
            raise TypeError("the schema of a dataclass needs pydantic: pip install pydantic, or give a dict") from None
        return TypeAdapter(described).json_schema()
    raise TypeError(f"json_schema={described!r}: give a dict, JSON text, a pydantic model or a dataclass")


def json_types(schema: Any, root: Any) -> set[str]:
    """The JSON types of the values that a schema allows; strings if it does not say.

    Args:
        schema: a JSON Schema; any other value restricts nothing.
        root: the schema in which references are resolved.
    """
    found: set[str] = set()
    parts = [schema]
    for _ in range(_MAX_PARTS):
        if not parts:
            break
        part = parts.pop()
        below = _alternatives(part, root)
        if below is None:
            found |= _own_types(part)
        else:
            parts += below[:_MAX_PARTS]
    return found or {"string"}


def json_types_of(value: Any) -> set[str]:
    """The JSON types of a value; a whole number has two."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    kinds = {int: {"number", "integer"}, dict: {"object"}, list: {"array"}, str: {"string"}}
    return kinds.get(type(value), set())


def _own_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return {"string"}
    named = schema.get("type")
    if isinstance(named, (str, list)):
        names = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
        return names & _TYPES or {"string"}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        return set().union(*map(json_types_of, choices))
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else {"string"}


def _alternatives(schema: Any, root: Any) -> list[Any] | None:
    """The alternatives of a schema; None if it describes the values itself."""
    if not isinstance(schema, Mapping) or "type" in schema:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return [_resolved(reference, root)]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            return parts
    return None


def _resolved(reference: str, root: Any) -> Any:
    """The target of a reference within the schema; None if there is none."""
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
