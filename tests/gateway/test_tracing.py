"""Spans of HTTP requests, and the trace context that Triton gets."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_client import ScriptedClient, text
from starlette.testclient import TestClient

from inflight_client import UnavailableError
from inflight_gateway import tracing
from inflight_gateway.app import build_app
from inflight_gateway.gateway import Gateway
from inflight_gateway.options import GatewayOptions
from inflight_gateway.tracing import make_provider
from inflight_gateway.upstream import Upstream

TRACE, SPAN = "a" * 32, "b" * 16
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
BODY: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 2}


class Traced:
    """A gateway whose spans stay here.  Each request starts it and ends it."""

    def __init__(self, answer: Callable[[Any], Any] = lambda request: text("a", "b"), **options: Any) -> None:
        self.memory = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.client = ScriptedClient(answer)
        chosen = GatewayOptions(**options)
        self.gateway = Gateway(chosen, Upstream(chosen, self.client), provider=provider)
        self.app = build_app(chosen, self.gateway)

    def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **changes: Any) -> Any:
        with TestClient(self.app, base_url="http://127.0.0.1", raise_server_exceptions=False) as http:
            return http.post(path, json={**BODY, **changes}, headers=headers)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.memory.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_within_the_clients_trace_is_the_parent_of_tritons(stream: bool) -> None:
    traced = Traced()
    assert traced.post(headers=SAMPLED, stream=stream).status_code == 200
    (span,) = traced.spans
    assert span.name == "POST /v1/completions" and span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    attributes = dict(span.attributes or {})
    assert len(attributes.pop("inflight.request_id")) == 32
    assert attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert [event.name for event in span.events] == ["first bytes of the answer"]
    (request,) = traced.client.requests
    assert request.trace_headers == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }


def test_without_a_header_a_trace_begins() -> None:
    traced = Traced()
    traced.post()
    (span,) = traced.spans
    assert span.parent is None
    assert traced.client.requests[0].trace_headers["traceparent"].startswith(f"00-{span.context.trace_id:032x}-")


def test_each_prompt_of_a_request_is_in_its_trace() -> None:
    traced = Traced()
    traced.post(prompt=["a", "b"], n=2)
    assert len(traced.spans) == 1
    assert len({request.trace_headers["traceparent"] for request in traced.client.requests}) == 1


def test_a_trace_that_is_not_recorded_is_not_exported_and_stays_so() -> None:
    traced = Traced()
    traced.post(headers=NOT_SAMPLED)
    assert not traced.spans
    assert traced.client.requests[0].trace_headers["traceparent"].endswith("-00")


@pytest.mark.parametrize("bad", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", "\xff", "x" * 5000])
def test_a_broken_header_begins_a_trace(bad: str) -> None:
    traced = Traced()
    assert traced.post(headers={"traceparent": bad.encode("latin-1")}).status_code == 200  # type: ignore[dict-item]
    assert traced.spans[0].parent is None


def test_failures_have_their_status() -> None:
    broken = Traced(lambda request: [UnavailableError("the model is being unloaded", code="UNAVAILABLE")])
    assert broken.post().status_code == 503
    (span,) = broken.spans
    assert not span.status.is_ok and (span.attributes or {})["error.type"] == "503"
    closed, lost = Traced(api_keys=("key",)), Traced()
    assert closed.post().status_code == 401 and lost.post("/nowhere").status_code == 404
    (refused,), (unknown,) = closed.spans, lost.spans
    assert refused.status.is_ok and (refused.attributes or {})["error.type"] == "401"
    assert unknown.name == "POST" and "http.route" not in (unknown.attributes or {})


def test_requests_without_a_body_have_no_spans() -> None:
    traced = Traced()
    with TestClient(traced.app, base_url="http://127.0.0.1") as http:
        assert http.get("/health").status_code == 200
    assert not traced.spans


async def test_without_spans_a_clients_context_is_passed_on(start: Any) -> None:
    front = await start(lambda request: text("a"))
    given: list[tuple[Any, dict[str, str]]] = [
        (SAMPLED, SAMPLED),
        ({}, {}),
        ({"traceparent": b"\xff"}, {}),
        ({"traceparent": "x" * 5000}, {}),
    ]
    for headers, passed in given:
        assert (await front.post("/v1/completions", BODY, headers=headers)).status_code == 200
        assert front.client.requests[-1].trace_headers == passed


async def test_other_backends_get_no_parameter_that_they_do_not_know(start: Any) -> None:
    front = await start(lambda request: text("a"))
    front.client.inputs["demo"] = ("text_input", "stream", "sampling_parameters")
    assert (await front.post("/v1/completions", BODY, headers=SAMPLED)).status_code == 200
    assert front.client.requests[-1].trace_headers == {}


@pytest.mark.parametrize("bad", ["collector:4317", "grpc://collector:4317", "http://"])
def test_an_endpoint_is_a_url(bad: str) -> None:
    with pytest.raises(ValueError, match="give a URL of a collector that takes OTLP over HTTP"):
        GatewayOptions(otlp_traces_endpoint=bad)


def test_without_the_sdk_a_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"not found; pip install 'triton-inflight\[otel\]'"):
        GatewayOptions(otlp_traces_endpoint="http://collector:4318")


def test_spans_go_to_the_usual_path() -> None:
    provider = make_provider("http://collector:4318/")
    (processor,) = provider._active_span_processor._span_processors
    assert processor.span_exporter._endpoint == "http://collector:4318/v1/traces"  # type: ignore[attr-defined]
    assert provider.resource.attributes["service.name"] == "inflight-gateway"
    provider.shutdown()


def test_without_the_option_the_gateway_imports_no_opentelemetry() -> None:
    program = "import sys, inflight_gateway.app; assert not [one for one in sys.modules if 'opentelemetry' in one]"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_collector_that_does_not_answer_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_LAST_SPANS_SECONDS", 0.01)
    traced, answered = Traced(), threading.Event()
    assert traced.gateway.provider is not None
    monkeypatch.setattr(traced.gateway.provider, "shutdown", answered.wait)
    assert traced.post().status_code == 200  # the gateway has ended
    answered.set()
