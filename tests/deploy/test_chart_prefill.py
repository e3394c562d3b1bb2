"""A release with pods for prompts: only the other pods reach their KV and their Tritons."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import helm_python
import msgspec
import pytest
import typer
import yaml
from charts import (
    CHART,
    FULLNAME,
    MODELS,
    ROOT,
    Manifest,
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
    server,
    validate,
)

from inflight.config import EngineConfig
from inflight.loading.saved.kv_identity import KV_DECISIVE
from inflight.runner.stores.peer_address import expect_private, host_and_port
from inflight_gateway.options import GatewayOptions
from inflight_tools.gateway import gateway as gateway_command

SECRET = {"kv": {"secret": {"name": "kv"}}}
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "tests/deploy/values/several/prefill.yaml").read_text())
SMALLEST: dict[str, Any] = {"prefill": {"replicas": 1}, **SECRET}
NAME = f"{FULLNAME}-prefill"
# Compared by gateways, or decisive for KV beside `KV_DECISIVE`, or for the tokens of a prompt and an answer.
DECIDE_ANSWERS = {
    *(
        "attention_backend",
        "device",
        "dtype",
        "head_bits",
        "hf_overrides",
        "max_model_len",
        "model",
        "revision",
        "seed",
    ),
    *("chat_template", "default_max_tokens", "exclude_input_in_output", "generation_config", "tokenizer"),
    *("tenant_header", "tokenizer_revision", "trust_request_chat_template", "wire_format"),
}
FOUND = {"most": render(VALUES), "least": render(SMALLEST)}
each = pytest.mark.parametrize("case", FOUND)


def prompts(found: list[Manifest]) -> Manifest:
    return only(found, "Deployment", name=NAME)


def config(found: list[Manifest], name: str) -> EngineConfig:
    return EngineConfig.from_dict(json.loads(only(found, "ConfigMap", name=f"{name}-model")["data"]["model.json"]))


def options(found: list[Manifest]) -> dict[str, Any]:
    """The gateway's, as it reads them."""
    app = typer.Typer(add_completion=False)
    app.command()(gateway_command)
    arguments = containers(server(found))["gateway"]["args"][1:]
    return typer.main.get_command(app).make_context("gateway", list(arguments)).params


@pytest.mark.parametrize("values", [VALUES, SMALLEST])
def test_it_lints_and_every_manifest_is_valid(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert not [message for message in report["messages"] if "icon is recommended" not in message["error"]]
    found = render(values)
    for one in found:
        validate(one)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)


def test_without_replicas_there_is_nothing_of_it() -> None:
    found = render({})
    assert NAME not in json.dumps(found) and "--handover" not in json.dumps(found)
    assert render({"prefill": {"replicas": 0, "handover": 100, "kvSize": "9GiB"}}) == found


@each
def test_every_selector_selects_what_it_should_and_nothing_else(case: str) -> None:
    found = FOUND[case]
    workloads = of_kind(found, "Deployment", "StatefulSet")
    assert workloads == [prompts(found), server(found)]
    for workload in workloads:
        name = workload["metadata"]["name"]
        spec = pod(workload)["spec"]
        spread = [one["labelSelector"]["matchLabels"] for one in spec["topologySpreadConstraints"]]
        for terms in spec["affinity"]["podAntiAffinity"].values():
            spread += [term["podAffinityTerm"]["labelSelector"]["matchLabels"] for term in terms]
        selectors = [
            *spread,
            workload["spec"]["selector"]["matchLabels"],
            only(found, "PodDisruptionBudget", name=name)["spec"]["selector"]["matchLabels"],
            only(found, "NetworkPolicy", name=name)["spec"]["podSelector"]["matchLabels"],
            *[only(found, "Service", name=one)["spec"]["selector"] for one in (name, f"{name}-pods")],
        ]
        for selector in selectors:
            assert [one for one in workloads if selects(selector, pod_labels(one))] == [workload]
    for service in of_kind(found, "Service"):
        (workload,) = [one for one in workloads if selects(service["spec"]["selector"], pod_labels(one))]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(workload)


@each
def test_engines_read_the_memory_of_all_pods_for_prompts(case: str) -> None:
    found = FOUND[case]
    read, reader = config(found, NAME), config(found, FULLNAME)
    for one in (read, reader):
        expect_private(one)  # with a secret, which is mounted
        assert one.kv_store_secret_file == "/etc/inflight-kv/secret"
    for workload in (prompts(found), server(found)):
        mounts = {mount["name"]: mount["mountPath"] for mount in containers(workload)["triton"]["volumeMounts"]}
        assert mounts["kv-secret"] == "/etc/inflight-kv"
        (volume,) = [one for one in pod(workload)["spec"]["volumes"] if one["name"] == "kv-secret"]
        assert volume["secret"] == {"secretName": "kv", "items": [{"key": "kv-secret", "path": "secret"}]}
    peer = reader.kv_tiers[-1]
    assert peer.type == "peer" and read.kv_tiers[0].type == "host" and reader.kv_listen is None
    assert read.kv_listen is not None and host_and_port(read.kv_listen) == ("0.0.0.0", ports(prompts(found))["kv"])
    name, port = host_and_port(peer.url or "")
    service = only(found, "Service", name=name)
    assert service["spec"]["clusterIP"] == "None", "so that its name has an address for each pod"
    assert port == ports(prompts(found))["kv"] and port in [one["port"] for one in service["spec"]["ports"]]
    assert selects(service["spec"]["selector"], pod_labels(prompts(found)))


def test_tiers_and_settings_of_all_pods_stay() -> None:
    read, reader = config(FOUND["most"], NAME), config(FOUND["most"], FULLNAME)
    assert [tier.type for tier in read.kv_tiers] == ["host", "disk"]
    assert [tier.type for tier in reader.kv_tiers] == ["disk", "peer"]
    assert read.kv_tiers[0].size == "32GiB" and read.kv_tiers[1] == reader.kv_tiers[0]
    assert (read.max_model_len, reader.max_model_len, read.max_num_seqs) == (16384, 16384, 4)
    assert (read.max_num_batched_tokens, reader.max_num_batched_tokens) == (8192, 1_000_000)
    assert (read.kv_cache_memory, reader.kv_cache_memory) == ("32GiB", 8_000_000_000), "under two names"
    own = {**SMALLEST, "model": {"settings": {"kv_tiers": [{"type": "host", "size": "7GiB"}]}}}
    found = render(own)
    assert [tier.size for tier in config(found, NAME).kv_tiers] == ["7GiB"], "it serves that one"
    assert [tier.type for tier in config(found, FULLNAME).kv_tiers] == ["host", "peer"]


@each
def test_gateways_hand_prompts_over_to_pods_of_the_same_version(case: str) -> None:
    found = FOUND[case]
    given = options(found)
    assert given["handover"] == {"most": "1048576", "least": "auto"}[case]
    (address,) = given["prefill_triton"]
    GatewayOptions(triton=tuple(given["triton"]), prefill_triton=(address,), handover=given["handover"])
    assert behind_prefill(address, found) == [prompts(found)]
    assert flag(containers(prompts(found))["triton"], "grpc-address") == "0.0.0.0"
    values = {"most": VALUES, "least": SMALLEST}[case]
    other = render({**values, "image": {"repository": "other"}})
    assert behind_prefill(address, other) == []
    assert behind_prefill(options(other)["prefill_triton"][0], other) == [prompts(other)]
    tuned = render({**values, "prefill": {**values["prefill"], "settings": {"max_num_seqs": 2}}})
    assert options(tuned)["prefill_triton"] == [address], "the pods that generate stay"
    assert pod(server(tuned)) == pod(server(found)) and pod(prompts(tuned)) != pod(prompts(found))


def behind_prefill(address: str, found: list[Manifest]) -> list[Manifest]:
    return behind(address, of_kind(found, "Service"), of_kind(found, "Deployment", "StatefulSet"))


@each
def test_only_engines_and_gateways_of_the_release_reach_pods_for_prompts(case: str) -> None:
    found = FOUND[case]
    policy = only(found, "NetworkPolicy", name=NAME)["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    rules = policy["ingress"]
    allowed = {(port["port"], json.dumps(peer)) for rule in rules for port in rule["ports"] for peer in rule["from"]}
    own = json.dumps({"podSelector": {"matchLabels": server(found)["spec"]["selector"]["matchLabels"]}})
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    expected = {("grpc", own), ("kv", own), ("metrics", json.dumps(monitoring))}
    if case == "most":
        expected.add(("kv", json.dumps({"podSelector": {"matchLabels": {"app": "other"}}})))
    assert allowed == expected
    others = only(found, "NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for rule in others for port in rule["ports"]} == {"openai", "grpc", "metrics"}


def test_pods_for_prompts_are_as_the_others_but_for_their_values() -> None:
    found = FOUND["most"]
    workload, others = prompts(found), server(found)
    assert (others["kind"], workload["kind"], workload["spec"]["replicas"]) == ("StatefulSet", "Deployment", 3)
    assert set(containers(workload)) == {"triton"} and set(containers(others)) == {"triton", "gateway"}
    mine, theirs = (containers(one)["triton"] for one in (workload, others))
    assert mine["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert theirs["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}
    for key in ("image", "env", "lifecycle", "readinessProbe", "startupProbe", "livenessProbe", "securityContext"):
        assert mine[key] == theirs[key] or key == "env", key  # a claim for each replica keeps packed weights
    spec, other = (pod(one)["spec"] for one in (workload, others))
    assert spec["nodeSelector"] == {"pool": "prompts"} and "nodeSelector" not in other
    assert spec["serviceAccountName"] == other["serviceAccountName"] and not spec["automountServiceAccountToken"]
    assert spec["terminationGracePeriodSeconds"] == other["terminationGracePeriodSeconds"]
    names = {volume["name"] for volume in spec["volumes"]}
    assert names == {mount["name"] for mount in mine["volumeMounts"]}
    assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}, "its rule is hard"
    (scaled,) = of_kind(found, "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == FULLNAME
    assert only(found, "PodDisruptionBudget", name=NAME)["spec"]["maxUnavailable"] == 1


def test_prometheus_finds_them() -> None:
    found = render({**SMALLEST, "monitoring": {"serviceMonitor": {"enabled": True}}})
    (monitor,) = of_kind(found, "ServiceMonitor")
    chosen = [
        one["metadata"]["name"]
        for one in of_kind(found, "Service")
        if selects(monitor["spec"]["selector"]["matchLabels"], one["metadata"]["labels"])
    ]
    assert sorted(chosen) == [f"{FULLNAME}-pods", f"{NAME}-pods"]


def test_handover_can_be_off() -> None:
    for off in ("off", False):  # YAML's older rules read off as false
        assert options(render({**SECRET, "prefill": {"replicas": 1, "handover": off}}))["handover"] == "off"
    assert options(render({**SECRET, "prefill": {"replicas": 1, "handover": 0}}))["handover"] == "0"


def with_settings(**settings: Any) -> dict[str, Any]:
    return {**SECRET, "prefill": {"replicas": 1, "settings": settings}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prefill": {"replicas": 1}}, "kv.secret.name must name a Secret"),
    ({**copy.deepcopy(MODELS), **SMALLEST}, "install a release for each model"),
    ({**SMALLEST, "model": {"settings": {"kv_listen": "0.0.0.0:7090"}}}, "prefill.replicas sets this key"),
    ({**SMALLEST, "model": {"settings": {"enable_prefix_caching": False}}}, "no request would use the KV"),
    ({**SMALLEST, "model": {"settings": {"kv_offloading_size": 4}}}, r"write kv_tiers: \[\{type: host, size: 4GiB\}\]"),
    (with_settings(kv_offloading_size=4), "see prefill.kvSize"),
    (with_settings(kv_tiers=[]), "the chart sets this key"),
    (with_settings(dtype="float32"), "or their KV is not read"),
    (with_settings(chat_template="x"), "or answers change .* These can differ: admission, .* watermark"),
    ({**SECRET, "prefill": {"replicas": 1, "server": {"gpus": 1}}}, "prefill.server.gpus=1 with server.gpus=0"),
    ({**SECRET, "prefill": {"replicas": 1, "server": {"gpus": 0}}, "server": {"gpus": 1}}, "give both kinds of pods"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_what_could_hand_nothing_over_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        render(values)


def test_settings_that_can_differ_change_neither_answers_nor_kv() -> None:
    template = (CHART / "templates/_helpers.tpl").read_text()
    (listed,) = re.findall(r'define "inflight.prefillKeys" -\}\}(.*?)\{\{- end', template, re.DOTALL)
    can_differ = listed.split()
    assert {*can_differ} <= {*EngineConfig.__struct_fields__} and sorted(can_differ) == can_differ
    assert {*can_differ}.isdisjoint({*KV_DECISIVE, *DECIDE_ANSWERS})
    defaults = msgspec.to_builtins(EngineConfig(model="x"))
    render(with_settings(**{key: defaults[key] for key in can_differ if defaults[key] is not None}))


@pytest.mark.parametrize(
    "given",
    [
        {"replicas": 17},
        {"replicas": -1},
        {"handover": "sometimes"},
        {"handover": -1},
        {"handover": True},
        {"kvSize": "much"},
        {"port": 8001},
        {"settings": {"max_num_seq": 1}},
        {"role": "decode"},
    ],
)
def test_the_schema_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        render({**SECRET, "prefill": {"replicas": 1, **given}})


def test_the_notes_name_them() -> None:
    assert f"rollout status deployment/{NAME}" in notes(SMALLEST)
    assert NAME not in notes({})
