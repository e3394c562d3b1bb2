"""The dashboard and the alerts use existing metrics and are valid files for their tools."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import ALERTS, DASHBOARD, DEPLOY, expressions, names_in

from inflight.frontend.operator.metric_specs import ADAPTER_METRICS, COUNTED, HISTOGRAM, METRICS
from inflight_gateway.metrics import Metrics

SCRAPE = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())

# Triton's metrics (docs/user_guide/metrics.md of tritonserver) and the one that Prometheus adds for the scrape.
ALL = (*METRICS, *ADAPTER_METRICS)
OF_SPECS = {
    "inflight_adapter_requests": {"adapter", "state"},
} | {
    spec.name + suffix: {*spec.engine_labels, *(spec.label or ())[:1]}
    for spec in ALL
    if spec.label or spec.engine_labels
    for suffix in ("", "_bucket", "_sum", "_count")
}
FOREIGN = {
    "nv_inference_request_success": {"model"},
    "nv_inference_request_failure": {"model", "reason"},
    "up": {"job"},
}
# The ServiceMonitor gives the last two.
LABELS = {"model", "version", "instance", "le", "job", "namespace", "service"}
# The gateway's, as its /metrics shows them: series and labels.
GATEWAY = {
    family.name + suffix: set(collector._labelnames)
    for collector in vars(Metrics()).values()
    if hasattr(collector, "_labelnames")
    for family in collector.describe()
    for suffix in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[family.type]
}
UNIT_TESTS = Path(__file__).with_name("alerts.test.yml")
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
# vLLM's names for what the dashboard shows by ours.
TWINS = {
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:num_requests_running": "inflight_requests_running",
    "vllm:num_requests_waiting": "inflight_requests_waiting",
    "vllm:kv_cache_usage_perc": "inflight_kv_blocks_used",
    "vllm:cache_config_info": "inflight_kv_blocks_free",
    "vllm:num_preemptions_total": "inflight_requests_preempted_total",
    "vllm:prefix_cache_queries_total": "inflight_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "inflight_prefix_cache_hits_total",
    "vllm:lora_requests_info": "inflight_adapter_requests",
}


def series() -> set[str]:
    """Names of the time series on `/metrics`."""
    names = {*FOREIGN, *GATEWAY}
    for spec in ALL:
        suffixes = ("_bucket", "_sum", "_count") if spec.kind in (HISTOGRAM, COUNTED) else ("",)
        names |= {spec.name + suffix for suffix in suffixes}
    return names


def test_every_name_is_a_metric_of_ours_or_of_triton():
    for title, expression in expressions():
        names = names_in(expression)
        assert names, expression
        assert names <= series(), f"{title}: /metrics has no {names - series()}"


def test_every_label_exists_on_its_series():
    for title, expression in expressions():
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
        for group in re.findall(r"\bby\s*\(([^)]*)\)", expression):
            used |= {label.strip() for label in group.split(",")}
        allowed = LABELS | {
            label
            for name in names_in(expression)
            for label in (*FOREIGN.get(name, ()), *OF_SPECS.get(name, ()), *GATEWAY.get(name, ()))
        }
        assert used <= allowed, title


def test_brackets_are_balanced_and_only_histograms_have_buckets():
    for title, expression in expressions():
        for left, right in ("()", "[]", "{}"):
            assert expression.count(left) == expression.count(right), title
        if "_bucket" in expression:
            assert "histogram_quantile" in expression and "le" in expression, title


def test_every_metric_of_ours_is_on_the_dashboard():
    shown = {name for title, expression in expressions() for name in names_in(expression)}
    wanted = [TWINS.get(spec.name, spec.name) for spec in ALL]
    missing = [name for name in wanted if not any(series.startswith(name) for series in shown)]
    assert not missing


def test_every_metric_of_the_gateway_is_on_the_dashboard():
    shown = {
        name for title, expression in expressions() if title.startswith("Gateway") for name in names_in(expression)
    }
    families = {
        name.removesuffix("_total").removesuffix("_bucket") for name in GATEWAY if not name.endswith(("_sum", "_count"))
    }
    assert len(families) >= 8
    assert not [family for family in families if not any(name.startswith(family) for name in shown)]


def test_the_dashboard_can_be_imported():
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD, "an id belongs to the Grafana that exported it"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        for target in () if panel["type"] == "row" else (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel)))
        assert used <= {*variables, "__rate_interval"}


def test_panels_do_not_overlap():
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} overlaps {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_alerts_have_what_prometheus_requires():
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 17
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_each_alert_has_a_section_that_says_what_to_do():
    page = DEPLOY.parent / "docs" / "operations" / "monitor.md"
    sections = dict(re.findall(r"(?ms)^### (Inflight\w+)\n\n(.+?)(?=^##|\Z)", page.read_text()))
    assert list(sections) == [rule["alert"] for rule in RULES], "in the order of the file"
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/operations/monitor.md#{rule['alert'].lower()}"
        assert len(sections[rule["alert"]].split()) >= 20, f"{rule['alert']}: what it means, and what to do"


def test_models_and_gateways_that_report_nothing_are_noticed():
    absent = [expression for _, expression in expressions() if expression.startswith("absent(")]
    assert absent == ["absent(inflight_requests_running)", "absent(inflight_gateway_open_requests)"]
    watched = set(re.findall(r'up\{job="([\w-]+)"\} == 0', json.dumps(ALERTS).replace("\\", "")))
    assert watched == {job["job_name"] for job in SCRAPE["scrape_configs"]}


def test_no_alert_says_that_requests_fail_which_are_replayed():
    """docs/operations/engine-failures.md."""
    (dies,) = [rule for rule in RULES if rule["alert"] == "InflightEngineDies"]
    assert "goes on with the open requests" in dies["annotations"]["description"]
    assert not re.search(r"requests? failed", dies["annotations"]["description"])


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    tested: dict[str, set[bool]] = {}
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            tested.setdefault(case["alertname"], set()).add(bool(case.get("exp_alerts")))
    assert tested == {rule["alert"]: {True, False} for rule in RULES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian: apt install prometheus)")
def test_each_alert_fires_when_it_should():
    for arguments in (
        ["check", "rules", str(DEPLOY / "prometheus" / "inflight-alerts.yml")],
        ["test", "rules", UNIT_TESTS],
    ):
        ended = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_scrape_configuration_names_the_rules_and_the_ports_of_triton_and_the_gateway():
    for name in SCRAPE["rule_files"]:
        assert (DEPLOY / "prometheus" / name).exists()
    ports = {"inflight": ":8002", "inflight-gateway": ":9000"}
    assert {job["job_name"] for job in SCRAPE["scrape_configs"]} == set(ports), "the alerts on `up` name the jobs"
    for job in SCRAPE["scrape_configs"]:
        assert job["metrics_path"] == "/metrics"
        targets = [target for config in job["static_configs"] for target in config["targets"]]
        assert targets and all(target.endswith(ports[job["job_name"]]) for target in targets)
