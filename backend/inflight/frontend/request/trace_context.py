"""The trace that a request belongs to: W3C Trace Context in its parameters.  No OpenTelemetry, no Triton.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["RequestTrace", "below_server_span", "trace_of"]

_KEYS = ("traceparent", "tracestate")
_PARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-(?P<flags>[0-9a-f]{2})(-.*)?")
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
    carrier = _carrier(parameters)
    parent = _PARENT.fullmatch(carrier.get("traceparent", ""))
    if parent is None:
        return RequestTrace({}, operation)
    return RequestTrace(carrier, operation) if int(parent["flags"], 16) & _SAMPLED else None


def below_server_span(parameters: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters` with the server's span as the parent, unless that span is not in the client's trace.

    Triton 24.10 sometimes does not read the metadata of a gRPC stream, and begins a trace of its own.

    Args:
        context: `traceparent` and `tracestate` of the server's span.
    """
    client, server = (_PARENT.fullmatch(_carrier(some).get("traceparent", "")) for some in (parameters, context))
    if server is None or (client is not None and client["trace"] != server["trace"]):
        return dict(parameters)
    return {key: value for key, value in parameters.items() if key.lower() not in _KEYS} | dict(context)


def _carrier(parameters: Mapping[str, Any]) -> dict[str, str]:
    return {
        key.lower(): value
        for key, value in parameters.items()
        if key.lower() in _KEYS and isinstance(value, str) and len(value) <= _MAX_CHARACTERS
    }
