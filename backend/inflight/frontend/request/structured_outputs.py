"""Constraints on the output -> `GrammarSpec`: vLLM's `structured_outputs`, TensorRT-LLM's `guided_decoding_guide`.

Only the form is checked here.  Schemas, expressions and grammars are checked when they are compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from inflight.frontend.errors import RequestError, shown
from inflight.grammars.spec import GrammarKind, GrammarSpec

__all__ = ["GUIDE_TYPES", "MAX_GRAMMAR_CHARS", "grammar", "guided_by", "structured_outputs"]

MAX_GRAMMAR_CHARS = 128 * 1024

_ANY_OBJECT = '{"type":"object"}'

# TensorRT-LLM's `guided_decoding_guide_type`.  "json" takes no guide.
_GUIDES: dict[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
GUIDE_TYPES = ("json", *_GUIDES)

_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
# Keys of vLLM that choose or tune libraries that do not exist here.
_IGNORED = {"backend", "backend_was_auto", "disable_fallback", "_backend", "_backend_was_auto"}


def grammar(**keys: Any) -> GrammarSpec:
    """For `SamplingParams(grammar=...)`: the keys of `structured_outputs`, one of them `json`, `regex`, `choice` ...

    `json` can be a pydantic model, too.

    Raises:
        ValueError: a key or value that is not allowed.
    """
    if hasattr(keys.get("json"), "model_json_schema"):
        keys["json"] = keys["json"].model_json_schema()
    try:
        spec = structured_outputs("grammar()", keys)
    except RequestError as error:
        raise ValueError(error.message) from None
    if spec is None:
        raise ValueError(f"grammar(): give one of {', '.join(_KINDS)}")
    return spec


def structured_outputs(name: str, value: Any) -> GrammarSpec | None:
    """vLLM's `structured_outputs`, and its older `guided_decoding`: an object, or the JSON text of one.

    Args:
        name: of the key, for errors.

    Returns:
        None if the value asks for nothing.

    Raises:
        RequestError: INVALID_ARG.
    """
    fields = _read(name, value)
    if not isinstance(fields, Mapping):
        raise _invalid(name, value, f"an object with one of {', '.join(_KINDS)}")
    given = {key: entry for key, entry in fields.items() if entry is not None and key not in _IGNORED}
    unknown = [key for key in given if key not in _KINDS and key not in _OPTIONS]
    if unknown:
        known = ", ".join([*_KINDS, *_OPTIONS])
        raise RequestError("INVALID_ARG", f"{name}: unknown key {shown(unknown[0])}; known keys: {known}")
    kinds = [key for key in _KINDS if key in given and given[key] is not False]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise RequestError("INVALID_ARG", f"{name} has {' and '.join(kinds)}: give one of them")
    kind, read = _KINDS[kinds[0]]
    text = read(f"{name}: {kinds[0]}", given[kinds[0]])
    options = {key: given[key] for key in _OPTIONS if key in given}
    return _checked(name, GrammarSpec(kind, text, _whitespace(name, options), not _flag(name, options, _OPTIONS[2])))


def guided_by(guide_type: Any, guide: Any) -> GrammarSpec:
    """TensorRT-LLM's pair of inputs.

    Raises:
        RequestError: INVALID_ARG.
    """
    name = "guided_decoding_guide"
    if guide_type not in GUIDE_TYPES:
        raise _invalid(f"{name}_type", guide_type, f"one of {', '.join(GUIDE_TYPES)}")
    if guide_type == "json":
        return GrammarSpec("json_schema", "{}")
    if guide is None:
        raise RequestError("INVALID_ARG", f"{name}_type={shown(guide_type)} needs {name}: add it")
    kind = _GUIDES[guide_type]
    read = {"json_schema": _json_text, "structural_tag": _json_text}.get(kind, _plain_text)
    return _checked(name, GrammarSpec(kind, read(name, guide)))


def _read(name: str, value: Any) -> Any:
    """The value of JSON text, or the value."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR_CHARS:
        raise _too_long(name, len(value))
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError("INVALID_ARG", f"{name}: not valid JSON: {error}") from None


def _json_text(name: str, value: Any) -> str:
    """An object, or the JSON text of one, as JSON text."""
    try:
        text = json.dumps(read := _read(name, value), ensure_ascii=False, separators=(",", ":"))
        text.encode("utf-8")
    except (ValueError, TypeError, RecursionError):
        raise _invalid(name, value, "an object, or the JSON text of one") from None
    if not isinstance(read, (Mapping, bool)):
        raise _invalid(name, value, "an object, or the JSON text of one")
    return text


def _plain_text(name: str, value: Any) -> str:
    try:
        if isinstance(value, str) and value:
            value.encode("utf-8")
            return value
    except UnicodeEncodeError:
        pass
    raise _invalid(name, value, "a string that is not empty")


def _choices(name: str, value: Any) -> str:
    choices = _read(name, value)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise _invalid(name, value, "a list of strings that is not empty")
    for text in choices:
        if text:
            _plain_text(name, text)
    return json.dumps(list(dict.fromkeys(choices)))


def _any_object(name: str, value: Any) -> str:
    if value is not True:
        raise _invalid(name, value, "true or false")
    return _ANY_OBJECT


_KINDS: dict[str, tuple[GrammarKind, Callable[[str, Any], str]]] = {
    "json": ("json_schema", _json_text),
    "json_object": ("json_schema", _any_object),
    "regex": ("regex", _plain_text),
    "choice": ("choice", _choices),
    "grammar": ("grammar", _plain_text),
    "structural_tag": ("structural_tag", _json_text),
}


def _whitespace(name: str, options: Mapping[str, Any]) -> str | None:
    if _flag(name, options, "disable_any_whitespace"):
        if options.get("whitespace_pattern") is not None:
            raise RequestError(
                "INVALID_ARG", f"{name} has disable_any_whitespace and whitespace_pattern: give one of them"
            )
        return ""
    pattern = options.get("whitespace_pattern")
    return None if pattern is None else _plain_text(f"{name}: whitespace_pattern", pattern)


def _flag(name: str, options: Mapping[str, Any], key: str) -> bool:
    value = options.get(key, False)
    if not isinstance(value, bool):
        raise _invalid(f"{name}: {key}", value, "true or false")
    return value


def _checked(name: str, spec: GrammarSpec) -> GrammarSpec:
    if spec.size > MAX_GRAMMAR_CHARS:
        raise _too_long(name, spec.size)
    return spec


def _too_long(name: str, size: int) -> RequestError:
    return RequestError("INVALID_ARG", f"{name} has {size} characters: at most {MAX_GRAMMAR_CHARS} are allowed")


def _invalid(name: str, value: Any, allowed: str) -> RequestError:
    return RequestError("INVALID_ARG", f"{name}={shown(value)}: must be {allowed}")
