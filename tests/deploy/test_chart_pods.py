"""The pods of the chart: how they end, and what selects and reaches them by name."""

from __future__ import annotations

import json
import re

import pytest
from charts import (
    CASES,
    FULLNAME,
    containers,
    flag,
    manifests,
    model_json,
    of_kind,
    only,
    pod,
    pod_labels,
    ports,
    render,
    selects,
    server,
)

each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_the_grace_period_covers_pre_stop_and_drain_and_each_part_outlasts_the_one_before(case: str) -> None:
    workload = server(manifests(case))
    triton, gateway = (containers(workload)[name] for name in ("triton", "gateway"))
    script = triton["lifecycle"]["preStop"]["exec"]["command"][-1]
    waited, drained = map(int, re.fullmatch(r"sleep (\d+); exec inflight-drain (\d+)", script).groups())  # type: ignore[union-attr]
    assert gateway["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(waited)], "both serve until then"
    timeout = json.loads(model_json(manifests(case)))["drain_timeout"]
    assert drained > timeout, "the model says that it has drained before the hook gives up"
    assert int(flag(gateway, "exit-timeout")) > timeout, "the gateway outlives its streams"
    assert int(flag(triton, "exit-timeout-secs")) > timeout
    assert pod(workload)["spec"]["terminationGracePeriodSeconds"] >= waited + drained + 10


def test_one_value_moves_all_of_them() -> None:
    for seconds in (0, 300):
        found = render({"drain": {"seconds": seconds, "endpointSeconds": 7}})
        assert json.loads(model_json(found))["drain_timeout"] == seconds
        assert pod(server(found))["spec"]["terminationGracePeriodSeconds"] == seconds + 27


@each_case
def test_every_named_port_is_a_port_of_its_pods(case: str) -> None:
    found = manifests(case)
    workloads = of_kind(found, "Deployment", "StatefulSet")
    for workload in workloads:
        for container in containers(workload).values():
            own = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container.get(probe, {})
                if "httpGet" in asked:
                    assert asked["httpGet"]["port"] in own
                if "grpc" in asked:
                    assert asked["grpc"]["port"] in own.values()
    for service in of_kind(found, "Service"):
        (workload,) = [one for one in workloads if selects(service["spec"]["selector"], pod_labels(one))]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(workload)
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports(workload)[port["targetPort"]], "a headless service translates no ports"
    for policy in of_kind(found, "NetworkPolicy"):
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert named <= set(ports(server(found)))
    for pool in of_kind(found, "InferencePool"):
        assert [port["number"] for port in pool["spec"]["targetPorts"]] == [ports(server(found))["openai"]]
        picker = only(found, "Service", name=pool["spec"]["endpointPickerRef"]["name"])
        assert pool["spec"]["endpointPickerRef"]["port"]["number"] in [p["port"] for p in picker["spec"]["ports"]]
    for route in of_kind(found, "HTTPRoute"):
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        target = only(found, backend.get("kind", "Service"), name=backend["name"])
        if target["kind"] == "Service":
            assert backend["port"] in [port["port"] for port in target["spec"]["ports"]]


@each_case
def test_every_selector_selects_what_it_should_and_nothing_else(case: str) -> None:
    found = manifests(case)
    workloads = of_kind(found, "Deployment", "StatefulSet")
    for workload in workloads:
        chosen = [one for one in workloads if selects(workload["spec"]["selector"]["matchLabels"], pod_labels(one))]
        assert chosen == [workload]
        assert "app.kubernetes.io/version" not in workload["spec"]["selector"]["matchLabels"], "it is immutable"
    spec = pod(server(found))["spec"]
    spread = [one["labelSelector"]["matchLabels"] for one in spec.get("topologySpreadConstraints", ())]
    for terms in spec.get("affinity", {}).get("podAntiAffinity", {}).values():
        spread += [term.get("podAffinityTerm", term)["labelSelector"]["matchLabels"] for term in terms]
    of_servers = [
        *spread,
        *[one["spec"]["selector"]["matchLabels"] for one in of_kind(found, "PodDisruptionBudget", "InferencePool")],
        *[one["spec"]["podSelector"]["matchLabels"] for one in of_kind(found, "NetworkPolicy")],
        *[only(found, "Service", name=name)["spec"]["selector"] for name in (FULLNAME, f"{FULLNAME}-pods")],
    ]
    for selector in of_servers:
        assert [one for one in workloads if selects(selector, pod_labels(one))] == [server(found)]
    for monitor in of_kind(found, "ServiceMonitor"):
        (service,) = [
            one
            for one in of_kind(found, "Service")
            if selects(monitor["spec"]["selector"]["matchLabels"], one["metadata"]["labels"])
        ]
        offered = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= offered
    if server(found)["kind"] == "StatefulSet":
        governing = only(found, "Service", name=server(found)["spec"]["serviceName"])
        assert governing["spec"]["clusterIP"] == "None"


@each_case
def test_the_smallest_fleet_can_lose_a_pod(case: str) -> None:
    found = manifests(case)
    scaled = of_kind(found, "ScaledObject")
    fewest = scaled[0]["spec"]["minReplicaCount"] if scaled else server(found)["spec"]["replicas"]
    assert ("replicas" in server(found)["spec"]) == (not scaled), "two owners would fight over it"
    for budget in of_kind(found, "PodDisruptionBudget"):
        spec = budget["spec"]
        assert spec.get("minAvailable", 0) < fewest and spec.get("maxUnavailable", 1) > 0
