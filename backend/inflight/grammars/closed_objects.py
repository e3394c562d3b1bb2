"""Objects that have only the properties that their schema names, also where `allOf` joins several schemas.

`additionalProperties` sees only the properties beside it: two parts of an `allOf` that each close their objects leave
`{}`.  So a joined schema is closed as a whole, and its parts stay open.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from inflight.grammars.subschemas import all_schemas, referred

__all__ = ["close_objects"]

_NAMING = ("properties", "patternProperties")
_SAYING = ("additionalProperties", "unevaluatedProperties")
_JOINING = ("allOf", "anyOf", "oneOf")
_NOT_COPIED = ("$id", "$anchor", "$defs", "definitions")  # `$ref` finds them in the original
_MAX_COPIES = 100


def close_objects(root: dict[str, Any]) -> None:
    """Add `additionalProperties: false` to each schema in `root` that names properties and does not say otherwise.

    Where branches of an `anyOf` or `oneOf` are beside other properties, an object may have the properties of all
    of them.

    Raises:
        ValueError: more than 100 schemas are both joined with others and used elsewhere.
    """
    copies: dict[int, tuple[str, dict[str, Any]]] = {}
    parts: set[int] = set()  # ids
    for schema in all_schemas(root):
        if id(schema) in parts:
            continue
        joined: list[dict[str, Any]] = []
        if _joins(schema):
            for part in _joined(root, schema):
                _refer_to_a_copy(root, part, copies)
                joined.append(part)
        parts.update(id(part) for part in joined if part is not schema)
        _close(schema, joined or [schema])


def _joins(schema: dict[str, Any]) -> bool:
    return "allOf" in schema or (_names(schema) and any(key in schema for key in ("$ref", *_JOINING)))


def _names(schema: dict[str, Any]) -> bool:
    return any(isinstance(schema.get(key), dict) for key in _NAMING)


def _joined(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema, and all that say something about the same object."""
    queue, seen = [schema], {id(schema)}
    while queue:
        part = queue.pop(0)
        yield part
        lists = [part[key] for key in _JOINING if isinstance(part.get(key), list)]
        for found in (*(entry for entries in lists for entry in entries), referred(root, part)):
            if isinstance(found, dict) and id(found) not in seen:
                seen.add(id(found))
                queue.append(found)


def _refer_to_a_copy(root: dict[str, Any], part: dict[str, Any], copies: dict[int, tuple[str, dict[str, Any]]]) -> None:
    """Point a `$ref` to a copy of its target, which is closed on its own elsewhere.

    Args:
        copies: id of a schema -> the reference to its copy, and the schema, which keeps the id its own.
    """
    target = referred(root, part)
    if target is None or any(part["$ref"] == reference for reference, _ in copies.values()):
        return
    if id(target) not in copies:
        if len(copies) == _MAX_COPIES:
            raise ValueError(
                f"disable_additional_properties: allOf, anyOf or oneOf join more than {_MAX_COPIES} schemas of a $ref: "
                "write additionalProperties into the schema"
            )
        definitions = root.setdefault("$defs", {})
        name = next(name for count in itertools.count() if (name := f"joined-{count}") not in definitions)
        definitions[name] = copy.deepcopy({key: value for key, value in target.items() if key not in _NOT_COPIED})
        copies[id(target)] = f"#/$defs/{name}", target
    part["$ref"] = copies[id(target)][0]


def _close(schema: dict[str, Any], joined: list[dict[str, Any]]) -> None:
    if any(key in part for part in joined for key in _SAYING) or not any(map(_names, joined)):
        return
    for key in _NAMING:
        names = {name: True for part in joined if isinstance(part.get(key), dict) for name in part[key]}
        if names:
            schema[key] = {**schema.get(key, {}), **{n: True for n in names if n not in schema.get(key, {})}}
    schema["additionalProperties"] = False
