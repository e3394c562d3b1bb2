"""A span of OpenTelemetry for each request, with children for the phases of its life.

Spans are made when a request has ended, from times that its stream has anyway, and sent in batches by a thread of the
SDK.  Names of attributes follow the semantic conventions for generative AI and, for latencies, vLLM's spans.  Prompts
and output are never part of a span.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from inflight.config import ConfigError, EngineConfig
from inflight.engine.messages import EngineReady, StepMessage
from inflight.frontend.output.interfaces import StatsSink
from inflight.frontend.output.request_state import RequestState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["RequestSpans", "make_provider"]

_SERVICE = "inflight"
_LAST_SPANS_SECONDS = 2.0
_MAX_DEATHS = 64


def make_provider(config: EngineConfig) -> TracerProvider:
    """Exports to `otlp_traces_endpoint`; the environment variables of OpenTelemetry's SDK choose the rest.

    Raises:
        ConfigError: the SDK is missing.
    """
    assert config.otlp_traces_endpoint is not None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={config.otlp_traces_endpoint!r}: {error.name} not found where the stub runs; "
            "pip install 'triton-inflight[otel]'"
        ) from None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(
        resource=Resource.create({} if named else {"service.name": _SERVICE}), shutdown_on_exit=False
    )
    url = config.otlp_traces_endpoint
    exporter = OTLPSpanExporter(url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestSpans:
    """A `StatsSink` that passes everything on, and makes the spans of ended requests.

    Args:
        sink: the next one.
        provider: makes and exports spans.
        model: its name in Triton.
        log_error: writes one line to the server's log.
    """

    def __init__(self, sink: StatsSink, provider: TracerProvider, model: str, log_error: Callable[[str], None]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._sink = sink
        self._provider = provider
        self._tracer = provider.get_tracer("inflight")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._log_error = log_error
        self._deaths: deque[tuple[float, str]] = deque(maxlen=_MAX_DEATHS)
        self.settle = sink.settle
        self.first_token = sink.first_token
        self.resubmitted = sink.resubmitted

    def step(self, message: StepMessage, received: float, open_ids: Container[int]) -> None:
        self._sink.step(message, received, open_ids)

    def engine_ready(self, ready: EngineReady, again: bool) -> None:
        if again:
            self._deaths.append((time.monotonic(), "engine restarted"))
        self._sink.engine_ready(ready, again)

    def engine_down(self) -> None:
        self._deaths.append((time.monotonic(), "engine died"))
        self._sink.engine_down()

    def finished(self, stream: RequestState) -> None:
        self._sink.finished(stream)
        self._export(stream, "")

    def unsuccessful(self, ending: str, stream: RequestState | None = None) -> None:
        self._sink.unsuccessful(ending, stream)
        if stream is not None:
            self._export(stream, ending)

    def stop(self) -> None:
        """Send the last spans; a collector that does not answer delays the unload by two seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS_SECONDS)

    def _export(self, stream: RequestState, ending: str) -> None:
        if stream.request.trace is None:
            return
        try:
            self._make_spans(stream, ending)
        except Exception as error:  # the answer is more important
            self._log_error(f"cannot make the span of request {stream.request_id}: {type(error).__name__}: {error}")

    def _make_spans(self, stream: RequestState, ending: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        trace = stream.request.trace
        assert trace is not None
        offset = time.time_ns() - time.monotonic_ns()
        end = time.monotonic() if stream.end_time is None else stream.end_time

        def at(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        span = self._tracer.start_span(
            f"{trace.operation} {self._model}",
            self._propagator.extract(trace.carrier),
            SpanKind.SERVER,
            self._attributes(stream, end),
            start_time=at(stream.arrival),
        )
        for moment, name in self._deaths:
            if stream.arrival < moment < end:
                span.add_event(name, timestamp=at(moment))
        if ending:
            span.set_attribute("error.type", ending)
            span.set_status(Status(StatusCode.ERROR, ending))
        if span.is_recording():
            inside = set_span_in_context(span)
            for name, start, stop, attributes in _phases(stream, end):
                child = self._tracer.start_span(name, inside, attributes=attributes, start_time=at(start))
                child.end(at(stop))
        span.end(at(end))

    def _attributes(self, stream: RequestState, end: float) -> dict[str, Any]:
        message = stream.request.engine_request
        params = message.params
        found = {
            "gen_ai.operation.name": stream.request.trace.operation if stream.request.trace else None,
            "gen_ai.provider.name": "inflight",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": stream.request.name or None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.stream": stream.request.stream,
            "gen_ai.usage.input_tokens": len(message.prompt_token_ids),
            "gen_ai.usage.cache_read.input_tokens": stream.num_cached_tokens,
            "gen_ai.usage.output_tokens": stream.num_output_tokens,
            "gen_ai.response.finish_reasons": [
                sequence.finish_reason for sequence in stream.sequences if sequence.finish_reason
            ],
            "gen_ai.latency.e2e": end - stream.arrival,
        }
        if stream.admitted_time is not None:
            found["gen_ai.latency.time_in_queue"] = stream.admitted_time - stream.arrival
        if stream.first_token_time is not None:
            found["gen_ai.latency.time_to_first_token"] = stream.first_token_time - stream.arrival
        return {name: value for name, value in found.items() if value is not None}


def _phases(stream: RequestState, end: float) -> list[tuple[str, float, float, dict[str, int]]]:
    """Name, start, end and attributes of the phases that the request has reached; a phase ends with the request."""
    admitted, first = stream.admitted_time, stream.first_token_time
    if admitted is None or first is None:
        return [("queued", stream.arrival, end, {})]
    times = stream.times.values()
    prefill = {
        "inflight.steps": sum(one.prefill_steps for one in times),
        "inflight.preemptions": sum(one.preemptions for one in times),
    }
    found = [("queued", stream.arrival, admitted, {}), ("prefill", admitted, first, prefill)]
    if end > first:
        found.append(("decode", first, end, {"inflight.steps": sum(one.decode_steps for one in times)}))
    return found
