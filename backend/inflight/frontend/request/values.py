"""Values as clients write them -> Python values: JSON values, strings ("temperature": "0", which vllm_backend accepts
too) or elements of typed tensors.  No torch, no Triton."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from inflight.frontend.errors import RequestError, shown

__all__ = [
    "field_of",
    "to_bool",
    "to_count",
    "to_float",
    "to_ids",
    "to_int",
    "to_logit_bias",
    "to_text",
    "to_texts",
]

_LOGIT_BIAS_LIMIT = 100.0  # vLLM clamps there


def to_int(value: Any) -> int:
    """An integer from 5, 5.0 or "5"."""
    if isinstance(value, str):
        value = float(value) if "." in value or "e" in value.lower() else int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError
    return int(value)


def to_count(value: Any) -> int | None:
    """An integer; true is 1, as in vllm_backend, and false is None: Triton's OpenAI frontend sends booleans."""
    return (1 if value else None) if isinstance(value, bool) else to_int(value)


def to_float(value: Any) -> float:
    """A finite number from 1, 0.5 or "0.5"."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def to_bool(value: Any) -> bool:
    """True or false from a boolean, 0, 1 or one of these as a string."""
    known = {"true": True, "false": False, "1": True, "0": False}
    try:
        return known[str(value).strip().lower()]
    except KeyError:
        raise ValueError from None


def to_text(value: Any) -> str:
    """A string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise ValueError
    value.encode("utf-8")  # JSON can contain unpaired surrogates: UnicodeEncodeError, which is a ValueError
    return value


def to_texts(value: Any) -> list[str]:
    """Strings without the empty ones; a single string counts as a list of one."""
    if isinstance(value, Mapping):
        raise ValueError
    texts = [to_text(entry) for entry in ([value] if isinstance(value, str) else value)]
    return list(dict.fromkeys(filter(None, texts)))


def to_ids(value: Any) -> list[int]:
    """Distinct token ids from a list, or from a string that is a JSON list."""
    if isinstance(value, str):
        value = json.loads(value)
    return list(dict.fromkeys(to_int(entry) for entry in (value if isinstance(value, list) else [value])))


def to_logit_bias(value: Any) -> dict[int, float]:
    """Token id -> bias, clamped to [-100, 100], from an object, or from a string that is a JSON object."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError
    limit = _LOGIT_BIAS_LIMIT
    return {to_int(key): max(-limit, min(limit, to_float(bias))) for key, bias in value.items()}


def field_of(fields: Mapping[str, Any], name: str, convert: Any, allowed: str, default: Any) -> Any:
    """The converted value, or `default` for None; raises RequestError (INVALID_ARG), which says what is `allowed`."""
    value = fields.get(name)
    if value is None:
        return default
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        raise RequestError("INVALID_ARG", f"{name}={shown(value)}: must be {allowed}") from None
