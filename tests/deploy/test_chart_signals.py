"""The signals that the chart names for KEDA, alerts and the endpoint picker exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from charts import (
    FULLNAME,
    MODELS,
    NAMESPACE,
    containers,
    flag,
    manifests,
    of_kind,
    only,
    ports,
    render,
    server,
    triggers,
)
from promql import ALERTS, names_in

from inflight.frontend.operator.metric_specs import GAUGE, METRICS

SPECS = {spec.name: spec for spec in METRICS}
# docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension, column vLLM.
PROTOCOL = {
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "cacheInfoSpec": "vllm:cache_config_info",
}


def test_the_endpoint_picker_reads_gauges_that_exist_where_it_looks() -> None:
    found = manifests("everything")
    config = yaml.safe_load(only(found, "ConfigMap", name=f"{FULLNAME}-epp")["data"]["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert plugins["core-metrics-extractor"]["defaultEngine"] == engine.pop("name")
    assert {key: spec.partition("{")[0] for key, spec in engine.items()} == PROTOCOL
    assert all(SPECS[name].kind == GAUGE for name in PROTOCOL.values())
    assert {spec.partition("{")[2] for spec in engine.values()} == {'model="demo"}'}
    used = [entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]]
    assert set(used) <= set(plugins)
    # It reads the port that it sends requests to, without a key.
    gateway = containers(server(found))["gateway"]
    metrics_port = ports(server(found))["metrics"]
    assert flag(gateway, "triton-metrics") == f"http://127.0.0.1:{metrics_port}{plugins['metrics-data-source']['path']}"
    assert "--open-metrics" in gateway["args"]
    assert "--open-metrics" not in containers(server(manifests("hub")))["gateway"]["args"]


@pytest.mark.parametrize(("name", "query"), list(triggers(manifests("everything"))))
def test_keda_asks_for_gauges_of_these_pods(name: str, query: str) -> None:
    (metric,) = names_in(query) - {"avg"}
    assert SPECS[metric].kind == GAUGE
    labels = dict(re.findall(r'(\w+)="([^"]*)"', query))
    assert labels == {"namespace": NAMESPACE, "service": f"{FULLNAME}-pods"}
    assert only(manifests("everything"), "Service", name=labels["service"])


def test_a_prometheus_without_data_scales_nothing() -> None:
    for trigger in only(manifests("everything"), "ScaledObject")["spec"]["triggers"]:
        assert trigger["metadata"]["ignoreNullValues"] == "false"


@pytest.mark.parametrize(
    ("values", "scraped"),
    [
        ({}, True),
        ({"gateway": {"apiKeysSecret": {"name": "keys"}}}, False),
        ({"gateway": {"apiKeysSecret": {"name": "keys"}, "openMetrics": True}}, True),
        ({"endpointPicker": {"enabled": True}}, False),
    ],
)
def test_alerts_on_gateways_come_only_with_their_metrics(values: Any, scraped: bool) -> None:
    """Without them, the alert that they are absent would always fire."""
    found = render({**values, "monitoring": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}})
    endpoints = only(found, "ServiceMonitor")["spec"]["endpoints"]
    assert [one["port"] for one in endpoints] == ["metrics", "openai"][: 1 + scraped]
    rules = only(found, "PrometheusRule")["spec"]
    assert [group["name"] for group in rules["groups"]] == ["inflight", "inflight-gateway"][: 1 + scraped]
    # The rest is as in the file.
    text = json.dumps(rules).replace(f'{{namespace=\\"{NAMESPACE}\\", service=~\\"{FULLNAME}(-.+)?-pods\\"}}', "")
    assert json.loads(text)["groups"] == ALERTS["groups"][: 1 + scraped]


def test_absent_metrics_are_those_of_this_release() -> None:
    found = render(MODELS | {"monitoring": {"rules": {"enabled": True}}})
    rules = [rule for group in only(found, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    (expression,) = [rule["expr"] for rule in rules if rule["alert"] == "InflightMetricsAbsent"]
    labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', expression))
    assert labels["namespace"] == NAMESPACE
    headless = [
        one["metadata"]["name"] for one in of_kind(found, "Service") if one["metadata"]["name"].endswith("-pods")
    ]
    assert len(headless) == 3 and all(re.fullmatch(labels["service"], name) for name in headless)
    assert not re.fullmatch(labels["service"], "other-inflight-pods")


def test_the_alerts_know_the_job_that_the_monitor_gives() -> None:
    endpoints: list[Any] = only(manifests("everything"), "ServiceMonitor")["spec"]["endpoints"]
    assert [(one["port"], one["relabelings"][0]["replacement"]) for one in endpoints] == [("metrics", "inflight")]
    endpoints = only(manifests("image"), "ServiceMonitor")["spec"]["endpoints"]
    assert [one["relabelings"][0]["replacement"] for one in endpoints] == ["inflight", "inflight-gateway"]
