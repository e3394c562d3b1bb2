"""The dashboard and the alerts use existing metrics and are valid files for their tools."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from promql import ALERTS, DASHBOARD, DEPLOY, expressions, names_in

from inflight.frontend.operator.metric_specs import COUNTED, HISTOGRAM, METRICS

SCRAPE = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())

# Triton's metrics (docs/user_guide/metrics.md of tritonserver) and the one that Prometheus adds for the scrape.
OF_SPECS = {
    spec.name + suffix: {spec.label[0]}
    for spec in METRICS
    if spec.label
    for suffix in ("", "_bucket", "_sum", "_count")
}
FOREIGN = {
    "nv_inference_request_success": {"model"},
    "nv_inference_request_failure": {"model", "reason"},
    "up": {"job"},
}
LABELS = {"model", "version", "instance", "le", "job"}
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
}


def series() -> set[str]:
    """Names of the time series on `/metrics`."""
    names = set(FOREIGN)
    for spec in METRICS:
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
            label for name in names_in(expression) for label in (*FOREIGN.get(name, ()), *OF_SPECS.get(name, ()))
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
    wanted = [TWINS.get(spec.name, spec.name) for spec in METRICS]
    missing = [name for name in wanted if not any(series.startswith(name) for series in shown)]
    assert not missing


def test_the_dashboard_can_be_imported():
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD, "an id belongs to the Grafana that exported it"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        for target in (panel, *panel["targets"]):
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
    rules: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]


def test_the_scrape_configuration_names_the_rules_and_tritons_port():
    for name in SCRAPE["rule_files"]:
        assert (DEPLOY / "prometheus" / name).exists()
    (job,) = SCRAPE["scrape_configs"]
    assert job["job_name"] == "inflight", "the alert on `up` names the job"
    assert job["metrics_path"] == "/metrics"
    assert all(target.endswith(":8002") for config in job["static_configs"] for target in config["targets"])
