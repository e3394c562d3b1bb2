"""`inflight gateway` hands its options on."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inflight_tools.gateway import gateway

APP = typer.Typer()
APP.command()(gateway)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Options of the gateways that would have run."""
    seen: list[tuple[Any, Any]] = []
    monkeypatch.setattr("inflight_gateway.server.run", lambda options, server: seen.append((options, server)))
    return seen


def test_options_for_a_pod(started: list[tuple[Any, Any]]) -> None:
    url = "http://127.0.0.1:8002/metrics"
    ended = CliRunner().invoke(APP, ["--exit-timeout", "65", "--triton-metrics", url, "--open-metrics"])
    assert ended.exit_code == 0, ended.output
    ((options, server),) = started
    assert (server.exit_timeout, options.triton_metrics, options.open_metrics) == (65, url, True)


def test_the_page_can_be_turned_off(started: list[tuple[Any, Any]]) -> None:
    shown = CliRunner().invoke(APP, ["--port", "0", "--admin-key", "a-key-of-16-chars"])
    plain = CliRunner().invoke(APP, ["--port", "0", "--no-page"])
    (with_page, server), (without, _) = started
    assert with_page.page and with_page.admin_key == "a-key-of-16-chars"
    assert f"a page for browsers at http://127.0.0.1:{server.port}/" in shown.output
    assert not without.page and without.admin_key == "" and "page" not in plain.output


def test_spans_go_to_a_collector(started: list[tuple[Any, Any]]) -> None:
    assert CliRunner().invoke(APP, ["--port", "0", "--otlp-traces-endpoint", "http://collector:4318"]).exit_code == 0
    assert started[0][0].otlp_traces_endpoint == "http://collector:4318"
    ended = CliRunner().invoke(APP, ["--otlp-traces-endpoint", "collector:4317"])
    assert ended.exit_code == 2 and "give a URL of a collector" in ended.output


def test_a_wrong_address_of_metrics_ends_it(started: list[tuple[Any, Any]]) -> None:
    ended = CliRunner().invoke(APP, ["--triton-metrics", "127.0.0.1:8002"])
    assert ended.exit_code == 2 and "expected a URL such as http://127.0.0.1:8002/metrics" in ended.output
    assert not started


def test_a_busy_port_ends_it_with_one_line(started: list[tuple[Any, Any]]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        ended = CliRunner().invoke(APP, ["--port", str(port)])
    said = f"inflight: port {port} (OpenAI) on 127.0.0.1: Address already in use; change --port (0 picks a free port)\n"
    assert (ended.exit_code, ended.output) == (1, said)
    assert not started


def test_a_free_port_is_named(started: list[tuple[Any, Any]]) -> None:
    ended = CliRunner().invoke(APP, ["--port", "0"])
    ((_, server),) = started
    assert server.port > 0 and f"http://127.0.0.1:{server.port}/v1" in ended.output


STOPPED = """
import signal, threading, time, os
from inflight_gateway import server
from inflight_tools.gateway import gateway
import typer, uvicorn

inner = uvicorn.Server.startup
async def startup(self, *args, **kwargs):
    await inner(self, *args, **kwargs)
    os.kill(os.getpid(), signal.{name})
uvicorn.Server.startup = startup
app = typer.Typer()
app.command()(gateway)
app(["--port", "0"])
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_is_success(name: str) -> None:
    """As its help says."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED.format(name=name)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
