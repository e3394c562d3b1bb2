"""A span of OpenTelemetry for each HTTP request, and the trace context that Triton gets.

https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

__all__ = ["Tracing", "check_endpoint", "close_provider", "make_provider", "trace_headers"]

_SERVICE = "inflight-gateway"
_HEADERS = ("traceparent", "tracestate")
_MAX_CHARACTERS = 1024
_LAST_SPANS_SECONDS = 2.0
_KEY = "inflight_trace_headers"


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError: spans cannot be exported to this URL, or OpenTelemetry's SDK is missing."""
    if not re.match(r"https?://[^/\s]+", endpoint):
        raise ValueError(
            f"otlp_traces_endpoint={endpoint!r}: give a URL of a collector that takes OTLP over HTTP, such as "
            "http://127.0.0.1:4318"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"otlp_traces_endpoint={endpoint!r}: {error.name} not found; pip install 'triton-inflight[otel]'"
        ) from None


def make_provider(endpoint: str) -> TracerProvider:
    """Exports to a URL that `check_endpoint` accepts; the SDK's environment variables choose the rest."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": _SERVICE})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return provider


async def close_provider(provider: TracerProvider) -> None:
    """Send the last spans; a collector that does not answer delays the end by two seconds."""
    thread = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, _LAST_SPANS_SECONDS)


def trace_headers(scope: Scope) -> dict[str, str]:
    """The trace context for Triton: that of the request's span, else what the client sent."""
    if _KEY in scope:
        found: dict[str, str] = scope[_KEY]
        return found
    headers = Headers(scope=scope)
    given = {name: headers.get(name, "") for name in _HEADERS}
    return {name: value for name, value in given.items() if value and value.isascii() and len(value) <= _MAX_CHARACTERS}


class Tracing:
    """ASGI middleware outside of all others: a span from the head of a request to the end of its answer.

    Args:
        app: the wrapped application.
        provider: makes and exports spans.
        paths: paths whose spans have their name; only requests with a body have spans.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider, paths: Collection[str]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer("inflight_gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        path = scope["path"]
        route = path if path in self._paths else ""
        attributes = {"http.request.method": "POST", "url.path": path, "url.scheme": scope["scheme"]}
        span = self._tracer.start_span(
            f"POST {route}".rstrip(),
            self._propagator.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            {**attributes, **({"http.route": route} if route else {})},
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        scope[_KEY] = carrier
        status, sent = 500, False

        async def sending(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message.get("body") and not sent:
                sent = True
                span.add_event("first bytes of the answer")
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            _describe_end(span, 499 if scope.get("client_gone") else status, scope.get("request_id", ""))


def _describe_end(span: Span, status: int, request_id: str) -> None:
    """End the span of a request that was answered with `status`."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes({"http.response.status_code": status, "inflight.request_id": request_id})
    if status >= 400:
        span.set_attribute("error.type", str(status))
    if status >= 500:  # the client's mistakes are none of the server
        span.set_status(Status(StatusCode.ERROR))
    span.end()
