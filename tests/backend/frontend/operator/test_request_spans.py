"""Spans of requests, from the streams of a real output processor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer, make_request
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from inflight.config import ConfigError, EngineConfig
from inflight.engine.deltas import SequenceDelta, SequenceTimes, StepStats
from inflight.engine.messages import EngineReady, StepMessage
from inflight.frontend.operator import request_spans
from inflight.frontend.operator.request_spans import RequestSpans, make_provider
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.request.trace_context import RequestTrace

STATS = StepStats(1, 0, 0, 1, 9, 0, 0, 1, 1, 1, 0.001)
TOKENIZER = demo_tokenizer()
PROMPT = TOKENIZER.encode("Return")
PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
READY = EngineReady(64, 1000, [], 9, 16, "float32", "cpu", "none", 0.1)


class Engine:
    """Takes everything."""

    def submit(self, request: Any) -> None: ...
    def abort(self, request_id: int, index: int | None = None) -> None: ...
    def release(self, request_id: int) -> None: ...
    def resubmit(self, requests: Any, hold_new: bool = False, settled: bool = True) -> None: ...
    def recall(self, emptied: Any) -> set[int]:
        raise NotImplementedError

    def ask(self, question: Any) -> Future[Any]:
        raise NotImplementedError


class Rig:
    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.stats, self.errors = RecordingStats(), []  # type: ignore[var-annotated]
        self.sink = RequestSpans(self.stats, provider, "demo", self.errors.append)
        self.streams = OutputProcessor(TOKENIZER, Engine(), self.sink, self.errors.append, check_seconds=0.01)
        self.streams.start()

    def open(self, trace: RequestTrace | None, **options: Any) -> RecordingClient:
        client = RecordingClient()
        request = make_request(PROMPT, **options)
        request.trace = trace
        self.streams.open(request, client)
        return client

    def step(self, *deltas: SequenceDelta) -> None:
        self.streams.on_step(StepMessage(list(deltas), STATS))

    def settle(self) -> None:
        handled = threading.Event()
        self.streams.run(self.streams._catch_up)
        self.streams.run(handled.set)
        assert handled.wait(10)

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, once the sender thread has made those of all ended streams."""
        self.settle()
        found = self.memory.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.streams.stop("test over")


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_a_span_with_its_phases(rig: Rig) -> None:
    trace = RequestTrace(PARENT, "chat")
    client = rig.open(trace, max_tokens=3, temperature=0.5, top_p=0.9, name="my-id", fields={"arrival": 100.0})
    rig.step(SequenceDelta(1, 0, [400], num_cached_tokens=1, times=SequenceTimes(101.0, 2, 0, 0)))
    rig.settle()
    rig.step(SequenceDelta(1, 0, [401]))
    rig.step(SequenceDelta(1, 0, [402], "length", times=SequenceTimes(101.0, 3, 2, 1)))
    client.wait()
    spans = rig.spans()
    assert set(spans) == {"chat demo", "queued", "prefill", "decode"}
    request = spans["chat demo"]
    assert request.kind is SpanKind.SERVER and request.status.is_ok
    assert parent_of(request) == int("b" * 16, 16) and f"{request.context.trace_id:x}" == "a" * 32
    for name in ("queued", "prefill", "decode"):
        assert parent_of(spans[name]) == request.context.span_id
    assert spans["queued"].end_time - spans["queued"].start_time == pytest.approx(1e9, abs=1e3)  # type: ignore[operator]
    assert spans["queued"].start_time == request.start_time
    assert spans["queued"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time and spans["decode"].end_time == request.end_time
    assert dict(spans["prefill"].attributes or {}) == {"inflight.steps": 3, "inflight.preemptions": 1}
    assert dict(spans["decode"].attributes or {}) == {"inflight.steps": 2}
    attributes = dict(request.attributes or {})
    assert attributes.pop("gen_ai.latency.e2e") >= attributes.pop("gen_ai.latency.time_to_first_token") > 0
    assert attributes.pop("gen_ai.latency.time_in_queue") == 1.0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inflight",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.id": "my-id",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": attributes["gen_ai.request.top_k"],
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert len(rig.stats.streams) == 1 and not rig.errors


def test_a_request_that_is_not_recorded_has_no_span(rig: Rig) -> None:
    client = rig.open(None, max_tokens=1)
    rig.step(SequenceDelta(1, 0, [400], "length"))
    client.wait()
    assert not rig.spans() and len(rig.stats.streams) == 1


def test_a_request_without_a_parent_begins_a_trace(rig: Rig) -> None:
    client = rig.open(RequestTrace({}, "text_completion"), max_tokens=1)
    rig.step(SequenceDelta(1, 0, [400], "length", times=SequenceTimes(0.0, 1, 0, 0)))
    client.wait()
    assert rig.spans()["text_completion demo"].parent is None


def test_a_cancelled_request_in_the_queue(rig: Rig) -> None:
    client = rig.open(RequestTrace(PARENT, "chat"))
    client.cancelled = True
    client.wait()
    spans = rig.spans()
    assert set(spans) == {"chat demo", "queued"}
    request = spans["chat demo"]
    assert not request.status.is_ok and (request.attributes or {})["error.type"] == "cancelled"
    assert spans["queued"].end_time == request.end_time and rig.stats.endings == ["cancelled"]


def test_an_engine_that_died_is_an_event(rig: Rig) -> None:
    rig.streams.on_engine_down([], {}, "before it came")
    rig.settle()
    client = rig.open(RequestTrace(PARENT, "chat"), max_tokens=2)
    rig.step(SequenceDelta(1, 0, [400], times=SequenceTimes(1.0, 1, 0, 0)))
    rig.settle()
    rig.streams.on_engine_down([1], {1: {0}}, "killed")
    rig.streams.on_engine_ready(READY)
    rig.step(SequenceDelta(1, 0, [401], "length", times=SequenceTimes(2.0, 1, 0, 0)))
    client.wait()
    request = rig.spans()["chat demo"]
    assert [event.name for event in request.events] == ["engine died", "engine restarted"] and request.status.is_ok
    assert rig.stats.deaths == 2 and [again for *_, again in rig.stats.pools] == [True]


def test_a_span_that_cannot_be_made_costs_no_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.sink, "_attributes", lambda *_: 1 / 0)
    client = rig.open(RequestTrace(PARENT, "chat"), max_tokens=1)
    rig.step(SequenceDelta(1, 0, [400], "length"))
    assert client.wait().error is None
    rig.settle()
    assert rig.errors == ["cannot make the span of request 1: ZeroDivisionError: division by zero"]


def test_without_the_sdk_a_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", otlp_traces_endpoint="http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"not found where the stub runs; pip install 'triton-inflight\[otel\]'"):
        make_provider(config)


@pytest.mark.parametrize(
    ("given", "sent_to"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_spans_go_to_the_usual_path(given: str, sent_to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = make_provider(EngineConfig(model="m", otlp_traces_endpoint=given))
    (processor,) = provider._active_span_processor._span_processors
    assert processor.span_exporter._endpoint == sent_to  # type: ignore[attr-defined]
    assert provider.resource.attributes["service.name"] == "inflight"
    provider.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    renamed = make_provider(EngineConfig(model="m", otlp_traces_endpoint=given))
    assert renamed.resource.attributes["service.name"] == "mine"
    renamed.shutdown()


@pytest.mark.parametrize("bad", ["collector:4317", "grpc://collector:4317", "", "http://", "http:///v1/traces"])
def test_an_endpoint_is_a_url(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"give a URL of a collector that takes OTLP over HTTP"):
        EngineConfig.from_dict({"model": "m", "otlp_traces_endpoint": bad})


def test_a_collector_that_does_not_answer_delays_no_unload(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_spans, "_LAST_SPANS_SECONDS", 0.01)
    answered = threading.Event()
    monkeypatch.setattr(rig.sink._provider, "shutdown", answered.wait)
    rig.sink.stop()
    answered.set()
