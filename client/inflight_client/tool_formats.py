"""Parts of structural tags, and the formats of calls with arguments other than one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inflight_client.schemas import json_types

__all__ = ["json_value", "pythonic_calls", "qwen3_coder_calls", "some", "tag"]

Part = dict[str, Any]

_ANY_NAME = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"


def tag(begin: str, content: Part, end: str = "") -> Part:
    """Content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: Any) -> Part:
    """JSON that matches a schema."""
    return {"type": "json_schema", "json_schema": schema}


def some(calls: Sequence[Part], separator: str, parallel: bool) -> Part:
    """One of the calls, or several."""
    return {
        "type": "tags_with_separator",
        "tags": list(calls),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def qwen3_coder_calls(functions: Mapping[str, Any], must: bool, parallel: bool) -> Part:
    """Calls with bare argument values on lines of their own; a string is any text, or a value of the enum."""
    mark = "<tool_call>"
    calls = [
        tag(f"{mark}\n<function={name}>\n", _parameters(schema), "</function>\n</tool_call>")
        for name, schema in functions.items()
    ]
    if must:
        return some(calls, "\n", parallel)
    return {"type": "triggered_tags", "triggers": [mark], "tags": calls, "stop_after_first": not parallel}


def pythonic_calls(functions: Mapping[str, Any], must: bool, parallel: bool) -> Part:
    """A list of Python calls, required arguments first.

    Raises:
        ValueError: an argument's name is no identifier in Python.
    """
    for name, schema in functions.items():
        for argument in _properties(schema):
            if not argument.isidentifier():
                raise ValueError(f"tool {name!r}: {argument!r} cannot be the name of an argument in Python")
    calls = [tag(f"{name}(", _keywords(schema), ")") for name, schema in functions.items()]
    listed = _sequence([_text("["), some(calls, ", ", parallel), _text("]")])
    return listed if must else _either({"type": "regex", "pattern": r"([^\[](?s:.*))?"}, listed)


def _parameters(schema: Any) -> Part:
    end = "\n</parameter>\n"
    found = [
        (name, tag(f"<parameter={name}>\n", _bare_value(_with_definitions(part, schema), schema), end))
        for name, part in _properties(schema).items()
    ]
    if not found and _takes_any(schema):
        value = tag("", {"type": "any_text"}, end)
        anything = _sequence([{"type": "regex", "pattern": r"[^<>\n]{1,256}>\n"}, value])
        return _list_of(tag("<parameter=", anything), "")
    required = _required(schema)
    return _sequence([part if name in required else _either(part, _text("")) for name, part in found] or [_text("")])


def _bare_value(schema: Any, root: Any) -> Part:
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices:
        return _either(*(_text(value if isinstance(value, str) else json.dumps(value)) for value in choices))
    return {"type": "any_text"} if "string" in json_types(schema, root) else json_value(schema)


def _keywords(schema: Any) -> Part:
    properties, required = _properties(schema), _required(schema)
    values = {name: json_value(_with_definitions(part, schema)) for name, part in properties.items()}
    if not values and _takes_any(schema):
        named = _sequence([{"type": "regex", "pattern": _ANY_NAME + "="}, json_value({})])
        return _list_of(tag("", named), ", ")
    if not any(name in required for name in values):
        return _list_of_any([tag(f"{name}=", value) for name, value in values.items()])
    ordered = sorted(values, key=lambda name: name not in required)
    parts = [tag(f"{', ' if number else ''}{name}=", values[name]) for number, name in enumerate(ordered)]
    return _sequence(
        [part if name in required else _either(part, _text("")) for name, part in zip(ordered, parts, strict=True)]
    )


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Any) -> list[Any]:
    required = schema.get("required") if isinstance(schema, Mapping) else None
    return required if isinstance(required, list) else []


def _takes_any(schema: Any) -> bool:
    return not isinstance(schema, Mapping) or schema.get("additionalProperties") is not False


def _with_definitions(schema: Any, root: Any) -> Any:
    """A property's schema with the definitions of its root, so that references resolve."""
    if not isinstance(schema, Mapping) or not isinstance(root, Mapping):
        return schema
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def _text(text: str) -> Part:
    return {"type": "const_string", "value": text}


def _sequence(parts: Sequence[Part]) -> Part:
    return {"type": "sequence", "elements": list(parts)}


def _either(*parts: Part) -> Part:
    return {"type": "or", "elements": list(parts)}


def _list_of(item: Part, separator: str) -> Part:
    return {"type": "tags_with_separator", "tags": [item], "separator": separator}


def _list_of_any(items: Sequence[Part]) -> Part:
    if not items:
        return _text("")
    return {"type": "tags_with_separator", "tags": list(items), "separator": ", "}
