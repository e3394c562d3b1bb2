"""The constraint on an answer: OpenAI's `response_format`, tool calls and reasoning in one.

The result are keys of `structured_outputs` (docs/structured-output.md), which the backend enforces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inflight_gateway.errors import invalid

__all__ = ["behind_reasoning", "body_constraint", "calls_or", "response_constraint"]

_KINDS = ("text", "json_object", "json_schema", "structural_tag")
_SPACE = {"type": "regex", "pattern": r"[ \t\r\n]{0,4}"}


def response_constraint(response_format: Any, param: str = "response_format") -> dict[str, Any] | None:
    """The constraint of a `response_format`; None if any text is allowed.

    Raises:
        APIError: not one of OpenAI's formats.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in _KINDS:
        raise invalid(f"{param}: type {kind!r} came; one of {', '.join(_KINDS)} is expected", param)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(response_format)}
    described = response_format.get("json_schema", response_format)  # /v1/responses has no inner object
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        raise invalid(f"{param}.json_schema.schema: a JSON Schema is expected", param)
    return {"json": schema}


def body_constraint(response_format: Any, structured_outputs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The constraint of a body that has one of the two keys, or none.

    Raises:
        APIError: both constrain the answer, or a format that is not OpenAI's.
    """
    response = response_constraint(response_format)
    if response is not None and structured_outputs is not None:
        raise invalid("structured_outputs: give it or response_format, not both", "structured_outputs")
    return structured_outputs if response is None else response


def calls_or(calls: dict[str, Any], response: dict[str, Any] | None) -> dict[str, Any]:
    """A constraint for tool calls, or for the response.

    Args:
        calls: constraint on calls alone.
        response: constraint on an answer without calls; None if that is not allowed.

    Raises:
        APIError: `response` is a grammar, which cannot be a part of something.
    """
    if response is None:
        return calls
    return _tagged(response, {"type": "or", "elements": [_part(calls), _required_part(response, "tools")]})


def behind_reasoning(constraint: dict[str, Any], tags: tuple[str, str], opened: bool) -> dict[str, Any]:
    """The same constraint, applied after the reasoning.

    A grammar in GBNF, EBNF or Lark cannot be a part of something, so it constrains the whole answer, which then has no
    reasoning.

    Args:
        tags: before and after the reasoning.
        opened: whether the prompt contained the first one, so that the answer must contain the second.
    """
    part = _part(constraint)
    if part is None:
        return constraint
    begin, end = tags
    thinking = {"type": "tag", "begin": "" if opened else begin, "content": {"type": "any_text"}, "end": end}
    whole = {"type": "sequence", "elements": [thinking, _SPACE, part]}
    return _tagged(constraint, whole if opened else {"type": "or", "elements": [whole, part]})


def _tagged(constraint: Mapping[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A structural tag, with the other options of `constraint`."""
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    options = {key: value for key, value in constraint.items() if key not in kinds}
    return {**options, "structural_tag": json.dumps({"type": "structural_tag", "format": part})}


def _required_part(constraint: dict[str, Any], beside: str) -> dict[str, Any]:
    part = _part(constraint)
    if part is None:
        raise invalid(
            f"structured_outputs: a grammar beside {beside} is not supported; use json, regex or choice",
            "structured_outputs",
        )
    return part


def _part(constraint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The constraint as a format of a structural tag; None if there is no such format."""
    if constraint.get("json") is not None:
        schema = _decoded(constraint["json"]) if isinstance(constraint["json"], str) else constraint["json"]
        return None if schema is None else {"type": "json_schema", "json_schema": schema}
    if constraint.get("json_object"):
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.get("regex") is not None:
        return {"type": "regex", "pattern": constraint["regex"]}
    if isinstance(choice := constraint.get("choice"), list) and choice:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in choice]}
    tag = constraint.get("structural_tag")
    described = _decoded(tag) if isinstance(tag, str) else tag
    part = described.get("format") if isinstance(described, Mapping) else None
    return part if isinstance(part, dict) else None


def _decoded(text: str) -> Any:
    """The JSON in a text; other text is returned unchanged, and the backend refuses it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
