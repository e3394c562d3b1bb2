"""Parts of a chart that operators expect: TLS, further volumes and variables, and rules for where pods run."""

from __future__ import annotations

from typing import Any

import pytest
from charts import (
    CASES,
    FULLNAME,
    containers,
    flag,
    manifests,
    of_kind,
    only,
    pod,
    render,
    server,
)

EDGE = manifests("edge")
SPEC = pod(server(EDGE))["spec"]


def test_the_gateway_speaks_https_with_the_certificate_of_a_secret() -> None:
    gateway = containers(server(EDGE))["gateway"]
    (volume,) = [one for one in SPEC["volumes"] if one.get("secret", {}).get("secretName") == "gateway-cert"]
    (mount,) = [one for one in gateway["volumeMounts"] if one["name"] == volume["name"]]
    assert flag(gateway, "ssl-certfile") == f"{mount['mountPath']}/tls.crt", "the keys of a Secret of type tls"
    assert flag(gateway, "ssl-keyfile") == f"{mount['mountPath']}/tls.key"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert gateway[probe]["httpGet"]["scheme"] == "HTTPS"
    (port,) = only(EDGE, "Service")["spec"]["ports"]
    assert port["appProtocol"] == "https"
    scraped = {one["port"]: one for one in only(EDGE, "ServiceMonitor")["spec"]["endpoints"]}
    assert scraped["openai"]["scheme"] == "https" and "scheme" not in scraped["metrics"], "Triton's has no TLS"


@pytest.mark.parametrize("case", sorted(set(CASES) - {"edge"}))
def test_without_a_certificate_nothing_expects_one(case: str) -> None:
    gateway = containers(server(manifests(case)))["gateway"]
    assert not any("ssl" in text for text in gateway["args"])
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    assert not any("tls" in one["name"] for one in pod(server(manifests(case)))["spec"]["volumes"])


def test_an_ingress_leads_each_host_to_the_gateway_with_its_certificate() -> None:
    spec = only(EDGE, "Ingress")["spec"]
    assert spec["ingressClassName"] == "nginx"
    assert {one["secretName"]: one["hosts"] for one in spec["tls"]} == {
        "llm-tls": ["llm.example"],
        "internal-tls": ["llm.internal"],
    }
    assert [rule["host"] for rule in spec["rules"]] == ["llm.example", "llm.internal"]
    offered = {port["name"] for port in only(EDGE, "Service")["spec"]["ports"]}
    for rule in spec["rules"]:
        assert [path["path"] for path in rule["http"]["paths"]] == ["/v1", "/api"]
        for path in rule["http"]["paths"]:
            assert path["pathType"] == "Prefix" and path["backend"]["service"]["name"] == FULLNAME
            assert path["backend"]["service"]["port"]["name"] in offered


def test_an_ingress_without_hosts_takes_any_and_shows_the_api_alone() -> None:
    (rule,) = only(render({"ingress": {"enabled": True}}), "Ingress")["spec"]["rules"]
    assert "host" not in rule and [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    tls = {"enabled": True, "hosts": ["a.example", "b.example"], "tls": [{"secretName": "both"}]}
    (entry,) = only(render({"ingress": tls}), "Ingress")["spec"]["tls"]
    assert entry["hosts"] == ["a.example", "b.example"]


def test_volumes_variables_and_init_containers_arrive() -> None:
    (init,) = SPEC["initContainers"]
    assert init["name"] == "wait" and {"name": "authorities", "configMap": {"name": "authorities"}} in SPEC["volumes"]
    found = containers(server(EDGE))
    for name in ("triton", "gateway"):
        assert [one for one in found[name]["volumeMounts"] if one["name"] == "authorities"]
    assert found["triton"]["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert found["gateway"]["envFrom"] == [{"configMapRef": {"name": "proxies"}}]


def test_pods_run_where_and_as_whom_the_values_say() -> None:
    assert SPEC["imagePullSecrets"] == [{"name": "registry"}]
    assert (SPEC["priorityClassName"], SPEC["runtimeClassName"]) == ("serving", "nvidia")
    assert SPEC["nodeSelector"] == {"pool": "gpu"} and SPEC["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert SPEC["serviceAccountName"] == "own" and not of_kind(EDGE, "ServiceAccount")
    (spread,) = SPEC["topologySpreadConstraints"]
    assert spread["maxSkew"] == 2, "in place of spreadZones"


@pytest.mark.parametrize(
    ("values", "surge", "unavailable"),
    [
        ({}, 1, 0),
        ({"scheduling": {"antiAffinity": "hard"}}, 0, 1),
        ({"scheduling": {"spreadZones": "hard"}}, 0, 1),
        ({"scheduling": {"antiAffinity": "hard", "affinity": {"nodeAffinity": {}}}}, 1, 0),
        ({"scheduling": {"antiAffinity": "hard"}, "workload": {"maxSurge": "50%"}}, "50%", 0),
        ({"workload": {"maxSurge": 0}}, 0, 1),
        ({"workload": {"maxSurge": 2, "maxUnavailable": 1}}, 2, 1),
    ],
)
def test_a_rollout_never_waits_for_a_node_that_the_rules_forbid(values: Any, surge: Any, unavailable: Any) -> None:
    """With a replica on every node, a hard rule leaves none to a new one until an old one has gone."""
    rollout = server(render(values))["spec"]["strategy"]["rollingUpdate"]
    assert (rollout["maxSurge"], rollout["maxUnavailable"]) == (surge, unavailable)


def test_the_default_rules_are_soft() -> None:
    spec = pod(server(manifests("defaults")))["spec"]
    assert set(spec["affinity"]["podAntiAffinity"]) == {"preferredDuringSchedulingIgnoredDuringExecution"}
    assert [one["whenUnsatisfiable"] for one in spec["topologySpreadConstraints"]] == ["ScheduleAnyway"]
