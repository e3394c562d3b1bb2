"""The chart's pods: which ports are reachable, which paths are writable, where secrets come from."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from charts import (
    CASES,
    MODELS,
    ROOT,
    Manifest,
    containers,
    flag,
    manifests,
    of_kind,
    only,
    pod,
    pod_labels,
    render,
    selects,
    server,
    validate,
    values_of,
)

IMAGE = (ROOT / "Dockerfile").read_text()
each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_only_the_gateway_is_reachable(case: str) -> None:
    found = manifests(case)
    values = values_of(case)
    grpc = values.get("service", {}).get("grpc", {}).get("enabled", False)
    failover = values.get("failover", {}).get("enabled", True)
    triton = containers(server(found))["triton"]
    assert flag(triton, "grpc-address") == ("0.0.0.0" if grpc or failover else "127.0.0.1")
    assert flag(triton, "model-control-mode") == "none"
    assert triton["args"][0] == "inflight-tritonserver", "which restricts management to the admin key"
    assert not any("UNRESTRICTED" in entry["name"] for entry in triton["env"])
    front = only(found, "Service")
    assert {port["targetPort"] for port in front["spec"]["ports"]} == ({"openai", "grpc"} if grpc else {"openai"})
    assert all(one["spec"].get("clusterIP") == "None" or one in (front, *_pickers(found)) for one in _services(found))
    for policy in of_kind(found, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            named = {port["port"] for port in rule["ports"]}
            assert "http" not in named, "Triton's own HTTP port"
            if "grpc" in named and not grpc:
                (peer,) = rule["from"]
                assert selects(peer["podSelector"]["matchLabels"], pod_labels(server(found))), "the other gateways"
                assert "namespaceSelector" not in peer
            if "metrics" in named:
                (peer,) = rule["from"]
                assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:7090", "[::]:7090", "kv.example:7090", "127.0.0.1:7090", "[::1]:7090", None]
)
def test_engines_that_read_kv_reach_its_port_and_nobody_else_does(listen: str | None) -> None:
    readers = [{"podSelector": {"matchLabels": {"app": "decoder"}}}]
    settings = {} if listen is None else {"kv_listen": listen, "kv_tiers": [{"type": "host", "size": "4GiB"}]}
    found = render({"model": {"settings": settings}, "kv": {"secret": {"name": "s"}, "readers": readers}})
    validate(only(found, "NetworkPolicy"))
    rules = [rule for rule in only(found, "NetworkPolicy")["spec"]["ingress"] if rule["ports"][0]["port"] == 7090]
    if listen is None or listen.startswith(("127.", "[::1]")):
        assert not rules
        return
    [rule] = rules
    assert rule["ports"] == [{"port": 7090, "protocol": "TCP"}]
    own, *others = rule["from"]
    assert set(own) == {"podSelector"} and selects(own["podSelector"]["matchLabels"], pod_labels(server(found)))
    assert others == readers


def test_servers_of_one_release_read_each_others_kv_whatever_their_model() -> None:
    values = copy.deepcopy(MODELS)
    values["models"][0]["model"]["settings"] |= {
        "kv_listen": "0.0.0.0:7090",
        "kv_tiers": [{"type": "host", "size": "4GiB"}],
    }
    values["kv"] = {"secret": {"name": "s"}}
    found = render(values)
    policies = [
        [rule for rule in one["spec"]["ingress"] if rule["ports"][0]["port"] == 7090]
        for one in of_kind(found, "NetworkPolicy")
    ]
    [[rule]] = [rules for rules in policies if rules]
    [peer] = rule["from"]
    workloads = [one for one in of_kind(found, "Deployment", "StatefulSet") if "triton" in containers(one)]
    assert len(workloads) == 2
    assert all(selects(peer["podSelector"]["matchLabels"], pod_labels(one)) for one in workloads)


def _services(found: list[Manifest]) -> list[Manifest]:
    return of_kind(found, "Service")


def _pickers(found: list[Manifest]) -> list[Manifest]:
    return [one for one in _services(found) if one["metadata"]["name"].endswith("-epp")]


@each_case
def test_pods_are_unprivileged_and_write_only_to_volumes(case: str) -> None:
    home = re.search(r"(?m)^ENV HOME=(\S+)$", IMAGE)[1]  # type: ignore[index]
    user = int(re.search(r"(?m)^USER (\d+):", IMAGE)[1])  # type: ignore[index]
    found = manifests(case)
    for workload in of_kind(found, "Deployment", "StatefulSet"):
        spec = pod(workload)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]
        kept = {one["name"]: one for one in spec.get("volumes", ())}
        claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        for container in containers(workload).values():
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            for mount in container["volumeMounts"]:
                volume = kept.get(mount["name"], {})
                assert volume or mount["name"] in claims
                if "emptyDir" in volume:
                    assert volume["emptyDir"]["sizeLimit"], "a full node disk evicts everybody"
                if {"configMap", "secret", "image"} & set(volume):
                    assert mount["readOnly"]
        assert set(kept) | claims == {m["name"] for c in containers(workload).values() for m in c["volumeMounts"]}
    spec = pod(server(found))["spec"]
    assert spec["securityContext"]["runAsUser"] == user and spec["automountServiceAccountToken"] is False
    written = {
        name: {mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")}
        for name, one in containers(server(found)).items()
    }
    assert written == {"triton": {home, "/dev/shm", "/tmp"}, "gateway": {"/tmp"}}
    (shm,) = [one for one in spec["volumes"] if one["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"


@each_case
def test_no_secret_is_rendered(case: str) -> None:
    found = manifests(case)
    assert not of_kind(found, "Secret")
    for workload in of_kind(found, "Deployment", "StatefulSet"):
        for container in containers(workload).values():
            for entry in container.get("env", ()):
                if re.search("KEY|TOKEN|SECRET|PASSWORD", entry["name"]):
                    assert "value" not in entry and entry["valueFrom"]["secretKeyRef"]
            assert not any(text.startswith(("--api-key=", "--admin-key=")) for text in container["args"])


def test_secrets_arrive_where_the_programs_look_for_them() -> None:
    workload = server(manifests("hub"))
    triton, gateway = (containers(workload)[name] for name in ("triton", "gateway"))
    environment = {entry["name"]: entry for entry in triton["env"]}
    assert environment["INFLIGHT_ADMIN_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "admin", "key": "admin-key"}
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}
    file = Path(flag(gateway, "api-key-file"))
    (mount,) = [one for one in gateway["volumeMounts"] if one["mountPath"] == str(file.parent)]
    (volume,) = [one for one in pod(workload)["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "keys"
    assert volume["secret"]["items"] == [{"key": "list", "path": file.name}]
