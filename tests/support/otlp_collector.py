"""A fake OpenTelemetry collector: takes OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collector", "ReceivedSpan", "collecting"]


_PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came; ids in hexadecimal digits, `parent` "" for a root, times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


@dataclass
class Collector:
    """The spans in the order in which they came.  Reads of `spans` from another thread see a prefix of them."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def children(self, span: ReceivedSpan) -> dict[str, ReceivedSpan]:
        """By name."""
        found = [one for one in self.spans if one.parent == span.span_id]
        assert len({one.name for one in found}) == len(found), "two children of one name"
        return {one.name: one for one in found}

    def wait_for(self, name: str, count: int) -> None:
        """Wait until as many spans with this name have come."""
        deadline = time.monotonic() + _PATIENCE
        while sum(one.name == name for one in list(self.spans)) < count:
            assert time.monotonic() < deadline, [one.name for one in self.spans]
            time.sleep(0.02)

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace."""
        return [one for one in self.spans if one.trace_id == trace_id]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at its `url` while the context is open."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces", self.path
            collector.spans.extend(_spans(_decoded(body, self.headers["Content-Type"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        yield collector
        server.shutdown()


def _decoded(body: bytes, content_type: str) -> ExportTraceServiceRequest:
    """The message; Triton sends JSON, with ids in hexadecimal digits."""
    if content_type != "application/json":
        return ExportTraceServiceRequest.FromString(body)
    return ParseDict(_with_bytes(json.loads(body)), ExportTraceServiceRequest(), ignore_unknown_fields=True)


def _with_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_bytes(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode() if key in _IDS else _with_bytes(one)
        for key, one in value.items()
    }


_IDS = ("traceId", "spanId", "parentSpanId")


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for of_resource in request.resource_spans:
        service = _plain(of_resource.resource.attributes).get("service.name", "")
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield ReceivedSpan(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _plain(span.attributes),
                    [event.name for event in span.events],
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
