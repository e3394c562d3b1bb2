"""The chart lints, and what it renders are manifests that Kubernetes and the other projects accept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from charts import (
    CASES,
    CHART,
    FULLNAME,
    ROOT,
    containers,
    helm_python,
    manifests,
    of_kind,
    only,
    render,
    server,
    validate,
    values_of,
)
from promql import DASHBOARD

VERSIONS = ("1.29", "1.33", "1.37")


@pytest.mark.parametrize("case", CASES)
def test_helm_lint_reports_nothing(case: str) -> None:
    report = helm_python.lint(CHART, values_of(case), strict=True)
    said = [message for message in report["messages"] if "icon is recommended" not in message["error"]]
    assert not said and not report["errors"]


@pytest.mark.parametrize("case", CASES)
def test_every_manifest_is_valid(case: str) -> None:
    found = manifests(case)
    assert found
    for version in VERSIONS[case == "image" :]:  # image volumes came with 1.31
        for manifest in found:
            validate(manifest, version)


def test_a_misspelt_key_is_found() -> None:
    for kind, path, value in [
        ("Deployment", ("spec", "template", "spec", "containres"), []),
        ("ScaledObject", ("spec", "maxReplicas"), 3),
        ("InferencePool", ("spec", "targetPortNumber"), 9000),
        ("PrometheusRule", ("spec", "group"), []),
        ("HTTPRoute", ("spec", "rule"), []),
        ("ServiceMonitor", ("spec", "endpoint"), []),
    ]:
        place = manifest = only(manifests("everything"), kind)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(manifest)


@pytest.mark.parametrize("case", CASES)
def test_names_are_unique_and_labels_are_the_recommended_ones(case: str) -> None:
    found = manifests(case)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)
    for one in found:
        labels = one["metadata"]["labels"]
        assert {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/version"} <= set(labels)
        assert one["metadata"].get("namespace") is None, "Helm says where"


@pytest.mark.parametrize("case", CASES)
def test_optional_parts_come_only_when_asked_for(case: str) -> None:
    optional = {"ScaledObject", "InferencePool", "HTTPRoute", "Ingress", "ServiceMonitor", "PrometheusRule"}
    found = {one["kind"] for one in manifests(case)} & optional
    expected = {
        "everything": optional - {"Ingress"},
        "image": {"ServiceMonitor", "HTTPRoute"},
        "edge": {"ServiceMonitor", "Ingress"},
    }
    assert found == expected.get(case, set())


def test_the_chart_and_the_image_have_the_versions_of_the_project() -> None:
    (version,) = re.findall(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    image = containers(only(manifests("defaults"), "Deployment"))["triton"]["image"]
    assert image == f"inflight:{version}"


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    for link in (CHART / "files").iterdir():
        assert link.is_symlink() and link.resolve().is_relative_to(CHART.parents[1]), "one source"
    found = manifests("everything")
    assert only(found, "PrometheusRule")["spec"]["groups"][0]["name"] == "inflight"
    assert json.loads(only(found, "ConfigMap", name=f"{FULLNAME}-dashboard")["data"]["inflight.json"]) == DASHBOARD


def test_packed_weights_are_kept_on_a_claim_only() -> None:
    """An emptyDir has a limit, and a pod that exceeds it is evicted."""
    for cache, kept in [({}, False), ({"existingClaim": "shared"}, True), ({"perReplica": True}, True)]:
        kind = {"workload": {"kind": "StatefulSet"}} if "perReplica" in cache else {}
        triton = containers(server(render({"cache": cache, **kind})))["triton"]
        assert {"name": "INFLIGHT_CACHE", "value": "off"} in triton["env"] or kept
        assert not kept or all(entry["name"] != "INFLIGHT_CACHE" for entry in triton["env"])


def test_a_volume_and_a_secret_for_kept_kv() -> None:
    for kv, volume in [
        ({}, None),
        ({"size": "50Gi"}, {"emptyDir": {"sizeLimit": "50Gi"}}),
        ({"existingClaim": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
    ]:
        workload = server(render({"kv": kv}))
        volumes = {one.pop("name"): one for one in workload["spec"]["template"]["spec"]["volumes"]}
        mounts = {one["name"]: one["mountPath"] for one in containers(workload)["triton"]["volumeMounts"]}
        assert volumes.get("kv") == volume
        assert mounts.get("kv") == (volume and "/var/lib/inflight-kv")
        assert "kv-secret" not in volumes | mounts
    found = render({"kv": {"secret": {"name": "s", "key": "k"}}})
    assert (
        json.loads(only(found, "ConfigMap", name=f"{FULLNAME}-model")["data"]["model.json"])["kv_store_secret_file"]
        == "/etc/inflight-kv/secret"
    )
    workload = server(found)
    assert {"name": "kv-secret", "secret": {"secretName": "s", "items": [{"key": "k", "path": "secret"}]}} in workload[
        "spec"
    ]["template"]["spec"]["volumes"]
    assert {"name": "kv-secret", "mountPath": "/etc/inflight-kv", "readOnly": True} in containers(workload)["triton"][
        "volumeMounts"
    ]


def test_adapters_of_a_model() -> None:
    adapters = {"doll": "/checkpoint/loras/doll", "sheep": "/loras/sheep"}
    found = render({"model": {"adapters": adapters, "settings": {"max_lora_rank": 32}}})
    data = only(found, "ConfigMap", name=f"{FULLNAME}-model")["data"]
    assert json.loads(data["multi_lora.json"]) == adapters
    assert json.loads(data["model.json"])["enable_lora"] is True
    mounts = {mount["mountPath"]: mount for mount in containers(server(found))["triton"]["volumeMounts"]}
    assert mounts["/repository/demo/1/multi_lora.json"]["subPath"] == "multi_lora.json"
    found = render({"model": {"settings": {"enable_lora": True, "lora_allowed_paths": ["/loras"]}}})
    assert json.loads(only(found, "ConfigMap", name=f"{FULLNAME}-model")["data"]["multi_lora.json"]) == {}
    assert "multi_lora.json" not in only(render({}), "ConfigMap", name=f"{FULLNAME}-model")["data"]


def test_a_packaged_chart_contains_alerts_and_dashboard(tmp_path: Path) -> None:
    """In an archive there are no links to files outside."""
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as chart:
        files = {one["name"]: one["data"] for one in chart.files}
        rendered = chart.render(values_of("everything"), name="prod", namespace="llm")
    assert {"files/inflight-alerts.yml", "files/inflight.json"} <= set(files)
    assert "InflightEngineDies" in rendered["inflight/templates/monitoring.yaml"]


def test_values_that_cannot_work_are_refused_with_the_reason() -> None:
    for values, said in [
        ({"replicas": 3}, "replicas"),
        ({"replicaCount": 0}, "replicaCount"),
        ({"model": {"source": "s3"}}, "source"),
        ({"model": {"source": "hub"}}, "model.hub.id"),
        ({"model": {"source": "pvc"}}, "model.pvc.claimName"),
        ({"model": {"source": "image"}}, "model.image.reference"),
        ({"model": {"name": "a/b"}}, "name"),
        ({"model": {"settings": {"drain_timeout": 5}}}, "drain.seconds"),
        ({"model": {"settings": {"model": "x"}}}, "model.source"),
        ({"terminationGracePeriodSeconds": 30}, "need at least 90"),
        ({"terminationGracePeriodSeconds": 89}, "need at least 90"),
        ({"cache": {"perReplica": True}}, "StatefulSet"),
        ({"kv": {"size": "1Gi", "existingClaim": "shared"}}, "choose one"),
        (
            {"kv": {"secret": {"name": "s"}}, "model": {"settings": {"kv_store_secret_file": "x"}}},
            "the chart sets this key, from kv.secret",
        ),
        ({"workload": {"maxSurge": 0, "maxUnavailable": "0%"}}, "a rollout could not begin"),
        ({"ingress": {"enabled": True, "tls": [{"secretName": "x"}]}}, "names no host"),
        ({"endpointPicker": {"enabled": True}, "gateway": {"tls": {"secretName": "x"}}}, "plain HTTP"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "no node could be drained"),
        ({"podDisruptionBudget": {"maxUnavailable": "", "minAvailable": 2}}, "no node could be drained"),
        ({"podDisruptionBudget": {"minAvailable": 1}}, "set one of"),
        (
            {
                "replicaCount": 9,
                "autoscaling": {"enabled": True, "minReplicas": 2},
                "podDisruptionBudget": {"maxUnavailable": "", "minAvailable": 2},
            },
            "with 2 replicas",
        ),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "above autoscaling.maxReplicas"),
        ({"autoscaling": {"kvCacheUsage": 85}}, "kvCacheUsage"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
        ({"gateway": {"extraEnv": [{"name": "INFLIGHT_API_KEY", "value": "secret"}]}}, "extraEnv"),
        ({"server": {"extraEnv": [{"name": "HF_TOKEN", "value": "secret"}]}}, "extraEnv"),
    ]:
        with pytest.raises(helm_python.HelmError) as caught:
            render(values)
        assert said in str(caught.value)


def test_values_that_the_simulator_writes_are_accepted() -> None:
    scaled = {"minReplicas": 3, "maxReplicas": 7, "waitingPerReplica": 2.5, "kvCacheUsage": 0.7}
    found = render({"replicaCount": 3, "autoscaling": {"enabled": True, **scaled}})
    spec = only(found, "ScaledObject")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 7)
    assert [trigger["metadata"]["threshold"] for trigger in spec["triggers"]] == ["2.5", "0.7"]
    assert not of_kind(render({"replicaCount": 3, "autoscaling": scaled}), "ScaledObject")
