"""The trace that a request belongs to: W3C Trace Context in its parameters.  No OpenTelemetry, no Triton.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["RequestTrace", "trace_of"]

_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MAX_CHARACTERS = 1024  # the standard asks for at least 512 of `tracestate`


class RequestTrace(NamedTuple):
    """The facts that a span of the request needs besides its times and counts.

    Attributes:
        carrier: `traceparent` and `tracestate`; empty: the span has no parent.
        operation: "chat" or "text_completion".
    """

    carrier: dict[str, str]
    operation: str


def trace_of(parameters: Mapping[str, Any], operation: str) -> RequestTrace | None:
    """The trace of a request; None if its client has decided that it is not recorded.

    Headers that Triton forwards are parameters under the spelling that the client sent.
    """
    carrier = {
        key.lower(): value
        for key, value in parameters.items()
        if key.lower() in ("traceparent", "tracestate") and isinstance(value, str) and len(value) <= _MAX_CHARACTERS
    }
    parent = _PARENT.fullmatch(carrier.get("traceparent", ""))
    if parent is None:
        return RequestTrace({}, operation)
    return RequestTrace(carrier, operation) if int(parent[1], 16) & _SAMPLED else None
