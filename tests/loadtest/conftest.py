"""A run of both models with known numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from load_records import row

from inflight_tools.workload.slo import SLO
from loadtest.analysis import Phase
from loadtest.options import LoadOptions
from loadtest.results import build
from loadtest.runner import Plan, Results
from loadtest.server import Endpoints
from loadtest.targets import server_targets

ROOT = Path(__file__).parents[2]


def _phase(model: str, streaming: bool, rate: float | None = None) -> Phase:
    rows = []
    for index in range(20):
        start = 0.5 * index
        stream = [(0.2 + 0.1 * at, 1) for at in range(10)]
        rows.append(row(index, start, stream if streaming else [(4.0, 10)], "long" if index % 5 == 0 else "short"))
        rows[-1]["due"] = index / rate if rate else None
    gauges = {"kv_used": 30.0, "kv_free": 70.0, "running": 4.0, "waiting": 1.0} if streaming else {"pending": 3.0}
    samples = [
        {"time": 100.0 + at, "server_cores": 1.0, "client_cores": 0.1, "cores": 1.2, **gauges} for at in range(1, 12)
    ]
    return Phase(model, rows, expected=20, begun=100.0, samples=samples, label="canned")


@pytest.fixture(scope="package")
def canned() -> dict[str, Any]:
    """`report.json` of a run whose numbers can be worked out by hand."""
    plan = Plan(LoadOptions(), rounds=2, sweep=(0.5, 1.0, 2.0), slo=SLO(1.0, 0.15))
    endpoints = Endpoints("127.0.0.1:8001", "127.0.0.1:8000", "127.0.0.1:8002")
    results = Results(plan, plan.load.load(), server_targets(endpoints, "grpc", ("inflight", "baseline")))
    for model, streaming in (("inflight", True), ("baseline", False)):
        results.rounds[model] = [_phase(model, streaming), _phase(model, streaming)]
        results.sweep[model] = [_phase(model, streaming, rate) for rate in (1.0, 2.0, 4.0)]
    return build(results, "python -m loadtest run --scenario lognormal", ["A note <b>from</b> the command line."])
