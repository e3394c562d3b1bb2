"""A release with several models: pods and Services for each, and one gateway in front that routes by name."""

from __future__ import annotations

import json
from typing import Any

import helm_python
import pytest
import typer
from charts import (
    CHART,
    FULLNAME,
    MODELS,
    behind,
    containers,
    flag,
    notes,
    of_kind,
    only,
    pod,
    pod_labels,
    ports,
    render,
    selects,
    validate,
)

from inflight.config import EngineConfig
from inflight_gateway.options import GatewayOptions
from inflight_tools.gateway import gateway as gateway_command

FOUND = render(MODELS)
NAMES = {"Qwen2.5": f"{FULLNAME}-qwen2-5", "demo": f"{FULLNAME}-demo"}
WORKLOADS = of_kind(FOUND, "Deployment", "StatefulSet")
FRONT = only(FOUND, "Deployment", name=f"{FULLNAME}-gateway")


def of_model(name: str) -> dict[str, Any]:
    return only(FOUND, "Deployment", "StatefulSet", name=NAMES[name])


def test_it_lints_and_every_manifest_is_valid() -> None:
    report = helm_python.lint(CHART, MODELS, strict=True)
    assert not [message for message in report["messages"] if "icon is recommended" not in message["error"]]
    for one in FOUND:
        validate(one)
    names = [(one["kind"], one["metadata"]["name"]) for one in FOUND]
    assert len(set(names)) == len(names)


def test_each_model_has_its_own_values_beside_the_common_ones() -> None:
    qwen, demo = (of_model(name) for name in NAMES)
    assert (qwen["kind"], qwen["spec"]["replicas"]) == ("Deployment", 3)
    assert (demo["kind"], demo["spec"]["replicas"]) == ("StatefulSet", 2)
    limits = [containers(one)["triton"]["resources"]["limits"] for one in (qwen, demo)]
    assert [one.get("nvidia.com/gpu") for one in limits] == [2, None], "0 replaces 1, too"
    for name, expected in (
        ("Qwen2.5", {"model": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16", "device": "cuda"}),
        ("demo", {"device": "cpu"}),
    ):
        settings = json.loads(only(FOUND, "ConfigMap", name=f"{NAMES[name]}-model")["data"]["model.json"])
        EngineConfig.from_dict(settings)
        assert expected.items() <= settings.items()
        assert flag(containers(of_model(name))["gateway"], "model") == name


def test_every_selector_selects_one_workload() -> None:
    for one in WORKLOADS:
        assert [other for other in WORKLOADS if selects(one["spec"]["selector"]["matchLabels"], pod_labels(other))] == [
            one
        ]
    selectors = [
        *[(one, one["spec"]["selector"]) for one in of_kind(FOUND, "Service")],
        *[(one, one["spec"]["selector"]["matchLabels"]) for one in of_kind(FOUND, "PodDisruptionBudget")],
        *[(one, one["spec"]["podSelector"]["matchLabels"]) for one in of_kind(FOUND, "NetworkPolicy")],
    ]
    for owner, selector in selectors:
        (chosen,) = [one for one in WORKLOADS if selects(selector, pod_labels(one))]
        own, name = owner["metadata"]["name"], chosen["metadata"]["name"]
        assert own.startswith(name) or (chosen is FRONT and own in (FULLNAME, f"{FULLNAME}-pods"))
        for port in owner["spec"].get("ports", ()):
            assert port["targetPort"] in ports(chosen)
    guarded = [selector for owner, selector in selectors if owner["kind"] == "NetworkPolicy"]
    assert all(any(selects(one, pod_labels(workload)) for one in guarded) for workload in WORKLOADS)


def test_the_gateway_in_front_finds_the_tritons_of_each_model_and_may_reach_them() -> None:
    app = typer.Typer()
    app.command()(gateway_command)
    name, *arguments = containers(FRONT)["gateway"]["args"]
    given = typer.main.get_command(app).make_context(name, list(arguments)).params
    options = GatewayOptions(triton=tuple(given["triton"]), routing=given["routing"])
    assert set(options.triton_groups) == set(NAMES)
    assert options.routing == "round-robin", "each address is the name of several pods"
    for model, (address,) in options.triton_groups.items():
        workload = of_model(model)
        assert behind(address, of_kind(FOUND, "Service"), WORKLOADS) == [workload]
        triton = containers(workload)["triton"]
        assert flag(triton, "grpc-address") == "0.0.0.0"
        assert int(flag(triton, "grpc-max-connection-age")) <= 60_000, "new replicas are found when a connection ends"
        policy = only(FOUND, "NetworkPolicy", name=NAMES[model])
        rules = [rule for rule in policy["spec"]["ingress"] if {"port": "grpc", "protocol": "TCP"} in rule["ports"]]
        peers = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule["from"]]
        assert any(selects(labels, pod_labels(FRONT)) for labels in peers)
        assert any(selects(labels, pod_labels(workload)) for labels in peers) == (model == "Qwen2.5"), "failover"
    assert given["api_key_file"] and FRONT["spec"]["replicas"] == 3


def test_the_gateway_in_front_runs_on_nodes_of_its_own() -> None:
    spec = pod(FRONT)["spec"]
    assert spec["nodeSelector"] == {"pool": "cpu"} and spec["tolerations"] == [{"operator": "Exists"}]
    assert "nvidia.com/gpu" not in json.dumps(spec)
    assert "nodeSelector" not in pod(of_model("demo"))["spec"]


def test_clients_reach_the_gateway_in_front() -> None:
    (path,) = only(FOUND, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    front = only(FOUND, "Service", name=path["backend"]["service"]["name"])
    assert selects(front["spec"]["selector"], pod_labels(FRONT))
    (container,) = only(FOUND, "Pod", name=f"{FULLNAME}-test")["spec"]["containers"]
    assert container["args"][1:4] == [f"http://{front['metadata']['name']}:80", *NAMES]
    for kind, name in (("deployment", NAMES["Qwen2.5"]), ("statefulset", NAMES["demo"])):
        assert f"rollout status {kind}/{name}\n" in notes(MODELS)


@pytest.mark.parametrize("grpc", [True, False])
def test_one_load_balancer_is_made_unless_grpc_needs_more(grpc: bool) -> None:
    service = {"type": "LoadBalancer", "annotations": {"balancer": "internal"}, "grpc": {"enabled": grpc}}
    found = of_kind(render({**MODELS, "service": service}), "Service")
    balanced = {one["metadata"]["name"] for one in found if one["spec"].get("type") == "LoadBalancer"}
    assert balanced == ({FULLNAME, *NAMES.values()} if grpc else {FULLNAME})
    assert {
        one["metadata"]["name"] for one in found if one["metadata"].get("annotations") == {"balancer": "internal"}
    } == balanced


def test_prometheus_finds_all_pods() -> None:
    labels = only(FOUND, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [one for one in of_kind(FOUND, "Service") if selects(labels, one["metadata"]["labels"])]
    scraped = [
        one["metadata"]["name"]
        for service in services
        for one in WORKLOADS
        if selects(service["spec"]["selector"], pod_labels(one))
    ]
    assert sorted(scraped) == sorted([FRONT["metadata"]["name"], *NAMES.values()])


def test_a_further_model_restarts_the_gateway_in_front_alone() -> None:
    more = render({**MODELS, "models": [*MODELS["models"], {"model": {"name": "third"}}]})
    for name in NAMES.values():
        assert only(more, "Deployment", "StatefulSet", name=name) == only(FOUND, "Deployment", "StatefulSet", name=name)
    assert only(more, "Deployment", name=f"{FULLNAME}-gateway") != FRONT


def test_one_model_becomes_several_without_a_change_of_a_selector() -> None:
    """Selectors of workloads are immutable, so another workload needs another name."""
    before = {(one["kind"], one["metadata"]["name"]) for one in of_kind(render({}), "Deployment", "StatefulSet")}
    assert not before & {(one["kind"], one["metadata"]["name"]) for one in WORKLOADS}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([{"model": {"name": "a.b"}}, {"model": {"name": "a-b"}}], "'a.b'|\"a.b\""),
        ([{"model": {}}], "name"),
        ([{"model": {"name": "gateway"}}], "choose another name"),
        ([{"model": {"name": "a"}, "gateway": {"workers": 2}}], "gateway"),
        ([{"model": {"name": "a", "settings": {"max_num_seq": 2}}}], "max_num_seq"),
        ([{"model": {"name": "a"}, "cache": {"perReplica": True}}], "StatefulSet"),
    ],
)
def test_models_that_cannot_work_are_refused_with_the_reason(models: Any, said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        render({"models": models})


def test_an_endpoint_picker_is_for_one_model() -> None:
    with pytest.raises(helm_python.HelmError, match="install a release for each"):
        render({"endpointPicker": {"enabled": True}, "models": [{"model": {"name": "a"}}]})


def test_long_names_stay_within_what_kubernetes_takes() -> None:
    long = {
        "fullnameOverride": "release" * 9,
        "models": [{"model": {"name": "model" * 9}, "workload": {"kind": "StatefulSet"}}],
    }
    for one in render(long):
        assert len(one["metadata"]["name"]) <= 63
        validate(one)
