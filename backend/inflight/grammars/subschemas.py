"""The places of schemas in a JSON Schema (Draft 2020-12 and before); a property's name is never read as a keyword."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["all_schemas", "referred", "subschemas"]

_ONE_OR_MORE = (
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def all_schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each schema in `root` that is an object, and each that a `$ref` points to, once; the whole one first."""
    queue, seen = [root], {id(root)}
    while queue:
        part = queue.pop()
        yield part
        for found in (*subschemas(part), referred(root, part)):
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                queue.append(found)


def subschemas(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas directly in a schema; `true` and `false` are left out."""
    for key in _ONE_OR_MORE:
        value = part.get(key)
        yield from _objects(value if isinstance(value, list) else [value])
    for key in _BY_NAME:
        value = part.get(key)
        yield from _objects(value.values() if isinstance(value, dict) else [])


def _objects(values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    return (value for value in values if isinstance(value, dict))


def referred(root: dict[str, Any], part: dict[str, Any]) -> dict[str, Any] | None:
    """The target of a `$ref` with a JSON pointer (RFC 6901); None if it is no object in `root`."""
    reference = part.get("$ref")
    pointer = reference.partition("#")[2] if isinstance(reference, str) else None
    if pointer is None or not (pointer.startswith("/") or reference == "#"):
        return None
    found: Any = root
    for name in pointer.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
