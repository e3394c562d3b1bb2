"""The programs of the image accept what the chart passes to them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from charts import (
    CASES,
    FULLNAME,
    ROOT,
    Manifest,
    containers,
    flag,
    manifests,
    model_json,
    only,
    pod,
    pod_labels,
    ports,
    render,
    selects,
    server,
    values_of,
)

from inflight.config import EngineConfig
from inflight_tools.gateway import gateway
from inflight_tools.repository import CONFIG_PBTXT

IMAGE = (ROOT / "Dockerfile").read_text()
SCRIPTS = {path.name: path.read_text() for path in (ROOT / "deploy" / "container").iterdir()}
each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_the_gateway_accepts_its_command_line(case: str) -> None:
    """As `inflight-gateway` reads it, values included."""
    name, *arguments = containers(server(manifests(case)))["gateway"]["args"]
    assert name in SCRIPTS
    given = typer.main.get_command(_bare()).make_context(name, list(arguments)).params
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


def test_the_gateways_limits_are_values() -> None:
    def options(case: str) -> dict[str, Any]:
        name, *arguments = containers(server(manifests(case)))["gateway"]["args"]
        return typer.main.get_command(_bare()).make_context(name, list(arguments)).params

    given, bare = options("everything"), typer.main.get_command(_bare()).make_context("gateway", []).params
    assert given["strict"] is True and given["allowed_hosts"] == ["llm.example", "*.svc.cluster.local"]
    assert (given["max_connections"], given["max_bodies_bytes"]) == (100_000, 268_435_456)
    assert (given["header_timeout"], given["reconnect_timeout"]) == (7.5, 0)
    limits = ("max_connections", "max_bodies_bytes", "header_timeout", "reconnect_timeout", "strict", "allowed_hosts")
    default = options("defaults")
    assert [default[name] for name in limits] == [bare[name] for name in limits], (
        "the chart's defaults are the program's"
    )


def test_a_stub_that_hangs_has_its_time() -> None:
    def patience(case: str) -> int:
        probe = containers(server(manifests(case)))["triton"]["livenessProbe"]
        return probe["periodSeconds"] * probe["failureThreshold"]

    assert (patience("defaults"), patience("everything")) == (60, 100)


def _bare() -> typer.Typer:
    app = typer.Typer()
    app.command()(gateway)
    return app


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
    """While a rollout changes the model or the image, old gateways find old Tritons only."""

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
