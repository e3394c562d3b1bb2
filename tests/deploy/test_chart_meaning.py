"""What the chart's manifests say to each other, to the image, and to the programs in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from charts import (
    CASES,
    FULLNAME,
    NAMESPACE,
    ROOT,
    Manifest,
    containers,
    manifests,
    model_json,
    of_kind,
    only,
    pod,
    ports,
    render,
    selects,
    server,
    triggers,
    values_of,
)
from promql import names_in

from inflight.config import EngineConfig
from inflight.frontend.metric_specs import GAUGE, METRICS
from inflight_tools.gateway import gateway
from inflight_tools.repository import CONFIG_PBTXT

IMAGE = (ROOT / "Dockerfile").read_text()
SCRIPTS = {path.name: path.read_text() for path in (ROOT / "deploy" / "container").iterdir()}

each_case = pytest.mark.parametrize("case", CASES)


def flag(container: Manifest, name: str) -> str:
    """The value of `--name=value`."""
    (value,) = [text.partition("=")[2] for text in container["args"] if text.startswith(f"--{name}=")]
    return value


def pod_labels(workload: Manifest) -> dict[str, str]:
    return pod(workload)["metadata"]["labels"]


# -- how a pod ends ------------------------------------------------------------------------------


@each_case
def test_the_grace_period_covers_pre_stop_and_drain_and_each_part_outlasts_the_one_before(case: str) -> None:
    workload = server(manifests(case))
    triton, door = (containers(workload)[name] for name in ("triton", "gateway"))
    script = triton["lifecycle"]["preStop"]["exec"]["command"][-1]
    waited, drained = map(int, re.fullmatch(r"sleep (\d+); exec inflight-drain (\d+)", script).groups())  # type: ignore[union-attr]
    assert door["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(waited)], "both serve until then"
    timeout = json.loads(model_json(manifests(case)))["drain_timeout"]
    assert drained > timeout, "the model says that it has drained before the hook gives up"
    assert int(flag(door, "exit-timeout")) > timeout, "the door outlives its streams"
    assert int(flag(triton, "exit-timeout-secs")) > timeout
    assert pod(workload)["spec"]["terminationGracePeriodSeconds"] >= waited + drained + 10


def test_one_value_moves_all_of_them() -> None:
    for seconds in (0, 300):
        found = render({"drain": {"seconds": seconds, "endpointSeconds": 7}})
        assert json.loads(model_json(found))["drain_timeout"] == seconds
        assert pod(server(found))["spec"]["terminationGracePeriodSeconds"] == seconds + 27


# -- ports, selectors ----------------------------------------------------------------------------


@each_case
def test_every_port_that_is_named_is_a_port_of_the_pods_that_are_meant(case: str) -> None:
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


# -- who reaches what ----------------------------------------------------------------------------


@each_case
def test_only_the_door_is_reachable(case: str) -> None:
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
                assert selects(peer["podSelector"]["matchLabels"], pod_labels(server(found))), "the other doors"
                assert "namespaceSelector" not in peer
            if "metrics" in named:
                (peer,) = rule["from"]
                assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


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
    triton, door = (containers(workload)[name] for name in ("triton", "gateway"))
    environment = {entry["name"]: entry for entry in triton["env"]}
    assert environment["INFLIGHT_ADMIN_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "admin", "key": "admin-key"}
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}
    file = Path(flag(door, "api-key-file"))
    (mount,) = [one for one in door["volumeMounts"] if one["mountPath"] == str(file.parent)]
    (volume,) = [one for one in pod(workload)["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "keys"
    assert volume["secret"]["items"] == [{"key": "list", "path": file.name}]


# -- what the programs take ----------------------------------------------------------------------


@each_case
def test_the_gateway_takes_its_command_line(case: str) -> None:
    """As `inflight-gateway` reads it, values included."""
    app = typer.Typer()
    app.command()(gateway)
    name, *arguments = containers(server(manifests(case)))["gateway"]["args"]
    assert name in SCRIPTS
    given = typer.main.get_command(app).make_context(name, list(arguments)).params
    first, *others = given["triton"]
    assert first == "127.0.0.1:8001" and given["port"] == ports(server(manifests(case)))["openai"]
    assert given["model"] == [values_of(case).get("model", {}).get("name", "demo")]
    for other in others:
        name, _, port = other.partition(":")
        service = only(manifests(case), "Service", name=name)
        assert service["spec"]["clusterIP"] == "None" and not service["spec"].get("publishNotReadyAddresses")
        assert selects(service["spec"]["selector"], pod_labels(server(manifests(case))))
        assert int(port) == service["spec"]["ports"][0]["port"]
    assert bool(others) == (case != "hub")


@each_case
def test_every_program_and_environment_variable_exists(case: str) -> None:
    scripts = "".join(SCRIPTS.values()) + IMAGE
    for container in containers(server(manifests(case))).values():
        assert container["args"][0] in SCRIPTS
        hooks = [container["lifecycle"]["preStop"], container["livenessProbe"]]
        for command in [hook["exec"]["command"] for hook in hooks if "exec" in hook]:
            programs = re.findall(r"inflight-[a-z]+", " ".join(command)) or [command[0]]
            assert all(program in {*SCRIPTS, "sleep"} for program in programs)
        for entry in container.get("env", ()):
            if entry["name"].startswith("INFLIGHT_"):
                assert entry["name"] in scripts
            else:
                assert entry["name"] in {"HF_TOKEN", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}


@each_case
def test_the_model_is_one_that_the_backend_loads(case: str) -> None:
    found = manifests(case)
    settings = json.loads(model_json(found))
    EngineConfig.from_dict(settings)
    config = only(found, "ConfigMap", name=f"{FULLNAME}-model")["data"]["config.pbtxt"]
    assert _code(config) == _code(CONFIG_PBTXT)
    triton = containers(server(found))["triton"]
    name = values_of(case).get("model", {}).get("name", "demo")
    mounts = {one["mountPath"]: one for one in triton["volumeMounts"]}
    repository = flag(triton, "model-repository")
    for path, file in ((f"{name}/config.pbtxt", "config.pbtxt"), (f"{name}/1/model.json", "model.json")):
        assert mounts[f"{repository}/{path}"]["subPath"] == file
    for probe in ("startupProbe", "readinessProbe"):
        assert triton[probe]["httpGet"]["path"] == f"/v2/models/{name}/ready"
    assert triton["livenessProbe"]["exec"]["command"] == ["inflight-alive", name]
    assert ("/checkpoint" in mounts) == settings["model"].startswith("/checkpoint")


def _code(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_a_stream_never_goes_on_with_another_model() -> None:
    """While a rollout changes the model or the image, old doors find old Tritons only."""

    def peers(values: dict[str, Any]) -> tuple[Manifest, Manifest]:
        found = render(values)
        (name,) = [text for text in containers(server(found))["gateway"]["args"] if "-triton-" in text]
        return only(found, "Service", name=name.partition("=")[2].partition(":")[0]), server(found)

    service, workload = peers({})
    for values in ({"model": {"settings": {"dtype": "float32"}}}, {"image": {"tag": "0.2.0"}}):
        other, changed = peers(values)
        assert other["metadata"]["name"] != service["metadata"]["name"]
        assert not selects(service["spec"]["selector"], pod_labels(changed))
        assert not selects(other["spec"]["selector"], pod_labels(workload))
        assert workload["spec"]["selector"] == changed["spec"]["selector"]
    other, same = peers({"replicaCount": 5, "gateway": {"workers": 2}})
    assert other == service and selects(service["spec"]["selector"], pod_labels(same))


def test_a_slow_load_is_waited_for() -> None:
    probe = containers(server(render({"probes": {"startupSeconds": 1801}})))["triton"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1801


def test_a_change_of_the_model_rolls_the_pods() -> None:
    """A file that is mounted with subPath does not change under a running pod."""
    pods = [pod(server(render({"model": {"settings": {"max_num_seqs": count}}}))) for count in (8, 9)]
    first, second = (one["metadata"]["annotations"]["checksum/model"] for one in pods)
    assert first != second


def test_a_gpu_is_asked_for_beside_the_other_limits() -> None:
    limits = containers(server(manifests("gpu")))["triton"]["resources"]["limits"]
    assert limits == {"memory": "32Gi", "nvidia.com/gpu": 1}
    assert "nvidia.com/gpu" not in json.dumps(manifests("cpu"))


# -- replicas ------------------------------------------------------------------------------------


@each_case
def test_fewest_replicas_leave_the_budget_something_to_give(case: str) -> None:
    found = manifests(case)
    scaled = of_kind(found, "ScaledObject")
    fewest = scaled[0]["spec"]["minReplicaCount"] if scaled else server(found)["spec"]["replicas"]
    assert ("replicas" in server(found)["spec"]) == (not scaled), "two owners would fight over it"
    for budget in of_kind(found, "PodDisruptionBudget"):
        spec = budget["spec"]
        assert spec.get("minAvailable", 0) < fewest and spec.get("maxUnavailable", 1) > 0


# -- signals -------------------------------------------------------------------------------------

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
    door = containers(server(found))["gateway"]
    metrics_port = ports(server(found))["metrics"]
    assert flag(door, "triton-metrics") == f"http://127.0.0.1:{metrics_port}{plugins['metrics-data-source']['path']}"
    assert "--open-metrics" in door["args"]
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


def test_the_alerts_know_the_job_that_the_monitor_gives() -> None:
    endpoints: list[Any] = only(manifests("everything"), "ServiceMonitor")["spec"]["endpoints"]
    assert [(one["port"], one["relabelings"][0]["replacement"]) for one in endpoints] == [("metrics", "inflight")]
    endpoints = only(manifests("image"), "ServiceMonitor")["spec"]["endpoints"]
    assert [one["relabelings"][0]["replacement"] for one in endpoints] == ["inflight", "inflight-gateway"]
