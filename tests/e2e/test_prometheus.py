"""A real Prometheus reads the rules that the chart renders, and answers what dashboard, alerts and KEDA ask it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from charts import FULLNAME, NAMESPACE, manifests, only, triggers
from promql import expressions

from inflight_client import Client
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH (Debian: apt install prometheus)")


class Prometheus:
    """A Prometheus that runs.

    Attributes:
        url: of its HTTP API.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.get("query", query=expression)["result"]


@pytest.fixture(scope="module")
def prometheus(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes the demo's server with the labels that the ServiceMonitor would give it."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "rules.yml").write_text(yaml.safe_dump(only(manifests("everything"), "PrometheusRule")["spec"]))
    labels = {"namespace": NAMESPACE, "service": f"{FULLNAME}-pods"}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "inflight", "static_configs": [{"targets": [server.metrics_address], "labels": labels}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = pick_ports(1)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    running = Prometheus(f"http://127.0.0.1:{port}")
    with Client(server.grpc_address, model="demo") as client:
        client.generate("Return a list of", max_tokens=8)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                scraped = running.query('count_over_time(up{job="inflight"}[5m])')
                if scraped and float(scraped[0]["value"][1]) >= 2:  # a rate takes two samples
                    break
            time.sleep(0.2)
        yield running
    finally:
        process.terminate()
        process.wait(30)


def test_keda_gets_one_number_from_each_query(prometheus: Prometheus) -> None:
    found = {name: prometheus.query(query) for name, query in triggers(manifests("everything"))}
    assert {name: [one["value"][1] for one in result] for name, result in found.items()} == {
        "waiting": ["0"],
        "kv-cache": ["0"],
    }


def test_keda_gets_nothing_rather_than_zero_of_pods_that_are_not_there(prometheus: Prometheus) -> None:
    for _, query in triggers(manifests("everything")):
        assert prometheus.query(query.replace(f'namespace="{NAMESPACE}"', 'namespace="other"')) == []


def test_the_rules_are_loaded_and_none_fires(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    written = only(manifests("everything"), "PrometheusRule")["spec"]["groups"]
    assert [rule["name"] for rule in rules] == [rule["alert"] for group in written for rule in group["rules"]]
    assert not [rule for rule in rules if rule.get("lastError")]
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_expression_is_understood(prometheus: Prometheus, title: str, expression: str) -> None:
    """With the dashboard's variables as Grafana fills them in."""
    filled = expression.replace("$__rate_interval", "1m")
    filled = re.sub(r"\$\{?(\w+)(:\w+)?\}?", ".*", filled)
    prometheus.query(filled)
