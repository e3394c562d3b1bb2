"""The programs of the image accept what the chart passes to them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from charts import (
    CASES,
    CHART,
    FULLNAME,
    MODELS,
    ROOT,
    Manifest,
    behind,
    containers,
    flag,
    manifests,
    model_json,
    of_kind,
    only,
    pod,
    ports,
    render,
    server,
    upgraded,
    values_of,
)

from inflight.config import EngineConfig
from inflight_tools.gateway import gateway
from inflight_tools.repository import CONFIG_PBTXT

IMAGE = (ROOT / "Dockerfile").read_text()
CACHE_FOLDER = ROOT / "backend" / "inflight" / "loading" / "saved" / "cache_folder.py"
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
        assert behind(other, of_kind(manifests(case), "Service"), [server(manifests(case))])
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
    scripts = "".join(SCRIPTS.values()) + IMAGE + CACHE_FOLDER.read_text()
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


def peers_of(workload: Manifest) -> str:
    """The address at which its gateway looks for other Tritons."""
    (address,) = [
        text.partition("=")[2] for text in containers(workload)["gateway"]["args"] if "-inflight-triton" in text
    ]
    return address


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_gateways_find_pods_that_serve_the_same_throughout_a_rollout(kind: str) -> None:
    """Old gateways find the old pods that are left, new ones the new: a stream never goes on with another model."""
    values = {"workload": {"kind": kind}}
    before = render(values)
    for change in ({"model": {"settings": {"dtype": "float32"}}}, {"image": {"tag": "0.2.0"}}):
        after = render({**values, **change})
        old, new = server(before), server(after)
        assert old["spec"]["selector"] == new["spec"]["selector"], "it is immutable"
        assert old["spec"].get("serviceName") == new["spec"].get("serviceName"), "so is this"
        for services in (of_kind(before, "Service"), upgraded(before, after)):
            assert behind(peers_of(old), services, [old, new]) == [old]
        assert behind(peers_of(new), upgraded(before, after), [old, new]) == [new]
    same = render({**values, "replicaCount": 5, "gateway": {"workers": 2}})
    assert peers_of(server(same)) == peers_of(server(before))
    assert len(behind(peers_of(server(same)), upgraded(before, same), [server(before), server(same)])) == 2


def test_no_upgrade_renames_a_service_of_a_deployment() -> None:
    before, after = ({one["metadata"]["name"] for one in of_kind(render(values), "Service")} for values in (
        {}, {"model": {"settings": {"dtype": "float32"}}, "image": {"tag": "0.2.0"}}
    ))  # fmt: skip
    assert before == after


def test_the_name_of_peers_is_not_the_one_that_a_pods_hosts_file_has() -> None:
    """Kubernetes writes HOST.SUBDOMAIN.NAMESPACE.svc.DOMAIN and HOST there, for the pod's own address alone."""
    host, _, rest = peers_of(server(manifests("defaults"))).partition(":")[0].partition(".")
    spec = pod(server(manifests("defaults")))["spec"]
    assert (host, rest) == (spec["hostname"], spec["subdomain"]) and "." not in rest


def test_a_slow_load_is_waited_for() -> None:
    probe = containers(server(render({"probes": {"startupSeconds": 1801}})))["triton"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1801


def test_a_change_of_the_model_rolls_the_pods() -> None:
    """A file that is mounted with subPath does not change under a running pod."""
    pods = [pod(server(render({"model": {"settings": {"max_num_seqs": count}}}))) for count in (8, 9)]
    first, second = (one["metadata"]["annotations"]["checksum/model"] for one in pods)
    assert first != second


@pytest.mark.parametrize("case", ["everything", "hub", "models"])
def test_a_new_version_of_the_chart_rolls_no_pods(case: str, tmp_path: Path) -> None:
    copied = tmp_path / "inflight"
    shutil.copytree(CHART, copied)
    text = (copied / "Chart.yaml").read_text()
    (copied / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0", "\nversion: 9.9.9"))
    values = MODELS if case == "models" else values_of(case)

    def parts(chart: Path) -> dict[str, tuple[Any, Any, Any]]:
        found = of_kind(render(values, chart), "Deployment", "StatefulSet")
        return {
            one["metadata"]["name"]: (one["spec"]["selector"], pod(one), one["spec"].get("volumeClaimTemplates"))
            for one in found
        }

    assert "9.9.9" in json.dumps(render(values, copied)) and parts(copied) == parts(CHART)


def test_a_gpu_is_asked_for_beside_the_other_limits() -> None:
    limits = containers(server(manifests("gpu")))["triton"]["resources"]["limits"]
    assert limits == {"memory": "32Gi", "nvidia.com/gpu": 1}
    assert "nvidia.com/gpu" not in json.dumps(manifests("cpu"))
