"""W3C Trace Context in the parameters of a request."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.frontend.request.trace_context import RequestTrace, below_server_span, trace_of

IDS = f"{'a' * 32}-{'b' * 16}"
SAMPLED, NOT_SAMPLED = f"00-{IDS}-01", f"00-{IDS}-00"


@pytest.mark.parametrize(
    ("parameters", "carrier"),
    [
        ({}, {}),
        ({"traceparent": SAMPLED}, {"traceparent": SAMPLED}),
        ({"Traceparent": SAMPLED, "TraceState": "a=b"}, {"traceparent": SAMPLED, "tracestate": "a=b"}),
        ({"traceparent": f"00-{IDS}-03"}, {"traceparent": f"00-{IDS}-03"}),
        ({"traceparent": f"01-{IDS}-01-more"}, {"traceparent": f"01-{IDS}-01-more"}),
        ({"traceparent": "nonsense", "tracestate": "a=b"}, {}),
        ({"traceparent": SAMPLED.upper()}, {}),
        ({"traceparent": 7}, {}),
        ({"traceparent": True, "tracestate": ["x"]}, {}),
        ({"traceparent": SAMPLED, "tracestate": "x" * 10**6}, {"traceparent": SAMPLED}),
        ({"traceparent": "\ud800"}, {}),
    ],
)
def test_the_parent_of_a_span(parameters: dict[str, Any], carrier: dict[str, str]) -> None:
    assert trace_of(parameters, "chat") == RequestTrace(carrier, "chat")


def test_a_client_that_does_not_record_has_no_span() -> None:
    assert trace_of({"traceparent": NOT_SAMPLED}, "chat") is None
    assert trace_of({"traceparent": f"00-{IDS}-02"}, "chat") is None


def test_a_server_that_traces_for_itself_is_the_parent() -> None:
    assert below_server_span({"max_tokens": 1}, {"traceparent": SAMPLED}) == {"max_tokens": 1, "traceparent": SAMPLED}
    assert below_server_span({"traceparent": "nonsense"}, {"traceparent": SAMPLED}) == {"traceparent": SAMPLED}
