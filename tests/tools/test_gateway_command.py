"""`inflight gateway` hands its options on."""

from __future__ import annotations

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


def test_a_wrong_address_of_metrics_ends_it(started: list[tuple[Any, Any]]) -> None:
    ended = CliRunner().invoke(APP, ["--triton-metrics", "127.0.0.1:8002"])
    assert ended.exit_code == 2 and "expected a URL such as http://127.0.0.1:8002/metrics" in ended.output
    assert not started
