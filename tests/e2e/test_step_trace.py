"""`inflight trace` against a real server."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_entries import loaded
from processes_of import engine_processes, stopped
from typer.testing import CliRunner
from wire import post

from inflight.engine.step_trace import Trace
from inflight_client import Client
from inflight_tools.cli import app
from inflight_tools.launcher import TritonServer

BUDGET = 32  # tokens of a step


@pytest.fixture(scope="module")
def traced(server: TritonServer) -> Iterator[TritonServer]:
    """A server with the model `traced` beside `demo`, which has no step trace."""
    with loaded(server, traced={"step_trace": True, "max_num_batched_tokens": BUDGET, "spare_engine": False}):
        yield server


def trace(server: TritonServer, model: str, *files: Path):
    arguments = ["trace", "--url", server.http_address, "--model", model]
    return CliRunner().invoke(app, [*arguments, *(part for file in files for part in ("-o", str(file)))])


def test_requests_are_traced_and_written_in_every_format(traced, tmp_path):
    page, perfetto, raw = tmp_path / "t.html", tmp_path / "t.perfetto.json", tmp_path / "t.json"
    early = trace(traced, "traced", page)
    assert early.exit_code == 1
    assert "send requests first" in early.output
    url = f"http://{traced.http_address}/v2/models/traced/generate"
    words = "the list of names " * 20  # longer than the budget of a step: several chunks

    def ask(number: int) -> None:
        status, answer = post(url, {"text_input": words, "max_tokens": 400 + number, "ignore_eos": True})
        assert status == 200, answer

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    with stopped(engine_processes(traced, "traced")), Client(traced.grpc_address, model="traced") as client:
        for thread in threads:
            thread.start()
        while json.loads(client.control("stats"))["frontend"]["open_requests"] < len(threads):
            time.sleep(0.02)
    for thread in threads:
        thread.join()
    result = trace(traced, "traced", page, perfetto, raw)
    assert result.exit_code == 0, result.output
    found = Trace.from_json(raw.read_bytes())
    assert sorted(request.num_output_tokens for request in found.requests) == [400, 401, 402, 403]
    assert {request.finish_reason for request in found.requests} == {"length"}
    assert sum(sum(step.samples) for step in found.steps) == 400 + 401 + 402 + 403
    assert all(sum(step.tokens) <= BUDGET for step in found.steps)
    assert any(len(step.keys) > 1 for step in found.steps), "they shared batches"
    for step in found.steps:
        assert min(step.schedule, step.forward, step.sample, step.update) > 0
        assert step.send > 0 or step is found.steps[-1]
    for request in found.requests:
        first = next(step for step in found.steps if request.key in step.keys)
        assert request.arrival <= first.start, "the frontend's arrival, on the engine's clock"
    assert {e.get("cat") for e in json.loads(perfetto.read_text())["traceEvents"]} >= {"waiting", "prefill", "decode"}
    data = re.search(r"^const D = (.*);$", page.read_text(), re.MULTILINE)
    assert data is not None
    assert json.loads(data[1])["model"] == "traced"


def test_the_grpc_port_gives_the_same_trace_as_the_http_port(traced, tmp_path):
    url = f"http://{traced.http_address}/v2/models/traced/generate"
    assert post(url, {"text_input": "the list of names", "max_tokens": 4, "ignore_eos": True})[0] == 200
    found = []
    for address in (traced.http_address, f"grpc://{traced.grpc_address}", traced.grpc_address):
        arguments = ["trace", "--url", address, "--model", "traced", "-o", str(tmp_path / "t.json")]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found.append(Trace.from_json((tmp_path / "t.json").read_bytes()).steps)
    assert found[0] == found[1] == found[2] != []


def test_a_model_without_the_trace_says_how_to_turn_it_on(traced, tmp_path):
    result = trace(traced, "demo", tmp_path / "t.html")
    assert result.exit_code == 1
    assert 'set "step_trace": true in model.json' in result.output
    assert not (tmp_path / "t.html").exists()


def test_an_unknown_model_and_an_unknown_control_are_rejected(traced, tmp_path):
    result = trace(traced, "missing", tmp_path / "t.html")
    assert result.exit_code == 1
    assert "missing" in result.output
    status, answer = post(f"http://{traced.http_address}/v2/models/traced/generate", {"control": "restart"})
    assert status == 400
    assert "control='restart': must be" in answer
