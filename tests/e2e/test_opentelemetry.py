"""One trace through gateway, Triton and backend, as a collector receives it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_entries import loaded, write_entry
from openai import BadRequestError, OpenAI
from otlp_collector import Collector, ReceivedSpan, collecting
from processes_of import begins_in_turns, engine_process, open_when_stopped, tries

from inflight_client import Client, InflightError
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

PROMPT = "Return a list of"
PHASES = {"queued", "prefill", "decode"}
KILLED = 20  # number of the first trace of a request whose engine may be killed


@pytest.fixture(autouse=True)
def spans_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds


def parent(number: int, sampled: bool = True) -> dict[str, str]:
    """A client's trace context."""
    return {"traceparent": f"00-{number:032x}-{number:016x}-{'01' if sampled else '00'}"}


@contextlib.contextmanager
def gateway(server: TritonServer, collector: Collector) -> Iterator[OpenAI]:
    """OpenAI's client of a gateway; it has sent all of its spans when the context ends."""
    (port,) = pick_ports(1)
    process = GatewayProcess(
        GatewayOptions(otlp_traces_endpoint=collector.url), ServerOptions(port=port, exit_timeout=5)
    )
    process.start(server.grpc_address)
    try:
        with OpenAI(base_url=process.url, api_key="any", max_retries=0) as client:
            yield client
    finally:
        process.stop()


def kill_engine_under_a_stream(server: TritonServer, direct: Client) -> tuple[int, str]:
    """The trace and the text of a request whose engine is killed after its first token; traces before it are whole."""
    engine = engine_process(server, "traced")
    for number in tries():
        trace = KILLED + number
        with direct.stream(PROMPT, max_tokens=300, ignore_eos=True, trace_headers=parent(trace)) as stream:
            chunks = iter(stream)
            with begins_in_turns(engine) as begun:
                next(chunks)
                begun.set()
            was_open = open_when_stopped(direct)
            if was_open:
                engine.kill()
            else:
                engine.resume()
            for _ in chunks:
                pass
            if was_open:
                return trace, str(stream.result().text)
    pytest.fail("the request had ended in every try")


def hang_up(server: TritonServer, client: OpenAI, direct: Client) -> None:
    """Disconnect after the first event of a stream."""
    engine = engine_process(server, "traced")
    body = {"model": "traced", "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    url = f"{client.base_url}completions"
    with (
        begins_in_turns(engine) as begun,
        httpx.stream("POST", url, json=body, headers=parent(4), timeout=60) as response,
    ):
        next(response.iter_lines())
        begun.set()
    while json.loads(direct.control("stats"))["frontend"]["open_requests"]:
        pass
    engine.resume()


def the_request(collector: Collector, trace_id: str) -> tuple[ReceivedSpan | None, ReceivedSpan]:
    """The gateway's span of a trace, None if it has none, and the backend's below it."""
    spans = collector.of(trace_id)
    fronts = [one for one in spans if one.service == "inflight-gateway"]
    (request,) = [one for one in spans if one.service == "inflight" and one.name not in PHASES]
    if fronts:
        (front,) = fronts
        assert request.parent == front.span_id and front.start <= request.start
        return front, request
    return None, request


@pytest.mark.nightly
def test_one_trace_for_each_request(triton: TritonServer) -> None:
    """All requests of the test are sent first, and then their spans are read."""
    with collecting() as collector:
        with (
            loaded(triton, traced={"otlp_traces_endpoint": collector.url, "check_on_load": False}),
            gateway(triton, collector) as client,
            Client(triton.grpc_address, model="traced") as direct,
            Client(triton.http_address, protocol="http", model="traced") as by_http,
        ):
            options: dict[str, Any] = {"model": "traced", "prompt": PROMPT, "max_tokens": 5}
            greedy = {**options, "extra_body": {"ignore_eos": True}}
            client.completions.create(**greedy, extra_headers=parent(1))
            client.completions.create(**greedy, extra_headers=parent(2, sampled=False))
            client.completions.create(**greedy, n=2, extra_headers=parent(3))
            hang_up(triton, client, direct)
            with pytest.raises(BadRequestError):
                client.completions.create(**options, temperature=-1, extra_headers=parent(5))
            killed, text = kill_engine_under_a_stream(triton, direct)
            with pytest.raises(InflightError):
                direct.generate(PROMPT, max_tokens=1900, ignore_eos=True, timeout=0.05, trace_headers=parent(7))
            by_http.generate(PROMPT, max_tokens=3, ignore_eos=True, trace_headers=parent(8))
            direct.generate(PROMPT, max_tokens=3, ignore_eos=True)
            expected = direct.generate(PROMPT, max_tokens=300, ignore_eos=True, trace_headers=parent(9, sampled=False))
            collector.wait_for("POST /v1/completions", 4)
            collector.wait_for("text_completion traced", 7 + killed - KILLED)
        check_an_answered_request(collector)
        assert not collector.of(f"{2:032x}") and not collector.of(f"{9:032x}")
        check_failures(collector)

        _, replayed = the_request(collector, f"{killed:032x}")
        assert replayed.events == ["engine died", "engine restarted"] and not replayed.failed
        assert replayed.attributes["gen_ai.usage.output_tokens"] == 300 and replayed.parent == f"{killed:016x}"
        assert len(text) > 0 and expected.usage.output_tokens == 300
        _, over_http = the_request(collector, f"{8:032x}")
        assert over_http.parent == f"{8:016x}"
        (alone,) = [one for one in collector.spans if one.service == "inflight" and not one.parent]
        assert alone.attributes["gen_ai.usage.output_tokens"] == 3


def check_an_answered_request(collector: Collector) -> None:
    front, request = the_request(collector, f"{1:032x}")
    assert front is not None and front.parent == f"{1:016x}"
    assert (front.name, front.attributes["http.response.status_code"]) == ("POST /v1/completions", 200)
    assert request.name == "text_completion traced" and not request.failed
    attributes = request.attributes
    assert attributes["gen_ai.request.model"] == "traced" and attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.usage.output_tokens"] == 5 and attributes["gen_ai.usage.input_tokens"] > 0
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 <= attributes["gen_ai.latency.time_in_queue"] <= attributes["gen_ai.latency.time_to_first_token"]
    assert attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    phases = collector.children(request)
    assert set(phases) == PHASES
    assert request.start == phases["queued"].start and phases["queued"].end == phases["prefill"].start
    assert phases["prefill"].end == phases["decode"].start and phases["decode"].end == request.end
    assert phases["prefill"].attributes["inflight.steps"] == 1
    assert phases["decode"].attributes["inflight.steps"] >= 4
    _, two = the_request(collector, f"{3:032x}")
    assert two.attributes["gen_ai.request.choice.count"] == 2
    assert two.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert two.attributes["gen_ai.usage.output_tokens"] == 10
    assert collector.children(two)["decode"].attributes["inflight.steps"] >= 8


def check_failures(collector: Collector) -> None:
    front, cancelled = the_request(collector, f"{4:032x}")
    assert front is not None and front.attributes["http.response.status_code"] == 499 and not front.failed
    assert cancelled.failed and cancelled.attributes["error.type"] == "cancelled"
    (refused,) = collector.of(f"{5:032x}")
    assert refused.attributes["http.response.status_code"] == 400 and not refused.failed
    _, late = the_request(collector, f"{7:032x}")
    assert late.failed and late.attributes["error.type"] == "timeout"


@pytest.mark.nightly
def test_tritons_own_span_is_between_them(triton_installed: None, tmp_path: Path) -> None:
    """Triton 24.10 sometimes does not read the context of a gRPC stream; the backend's span is in its trace even so."""
    with collecting() as collector:
        write_entry(tmp_path, "traced", otlp_traces_endpoint=collector.url, check_on_load=False)
        trace = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}/v1/traces"]
        arguments = [part for setting in trace for part in ("--trace-config", setting)]
        with (
            TritonServer(tmp_path, extra_args=arguments, exit_timeout=5) as server,
            gateway(server, collector) as client,
        ):
            for number in range(1, 9):
                client.completions.create(model="traced", prompt=PROMPT, max_tokens=5, extra_headers=parent(number))
            collector.wait_for("text_completion traced", 8)
            collector.wait_for("InferRequest", 8)
        chains = [chain_of(collector, number) for number in range(1, 9)]
        whole = ["POST /v1/completions", "InferRequest", "traced", "text_completion traced"]
        assert all(chain in (whole, [whole[0], whole[-1]]) for chain in chains) and whole in chains, chains


def chain_of(collector: Collector, number: int) -> list[str]:
    """The names of the spans from the gateway's down to the backend's, in the trace of a client."""
    by_id = {one.span_id: one for one in collector.of(f"{number:032x}")}
    (span,) = [one for one in by_id.values() if one.service == "inflight" and one.name not in PHASES]
    names = [span.name]
    while span.parent in by_id:
        span = by_id[span.parent]
        names.append(span.name)
    assert span.parent == f"{number:016x}"
    return names[::-1]
