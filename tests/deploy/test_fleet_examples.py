"""The examples for KServe and for Compose with Envoy fit the image and each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import typer
import yaml

from inflight.config import EngineConfig
from inflight_tools.gateway import gateway
from inflight_tools.repository import CONFIG_PBTXT

ROOT = Path(__file__).parents[2]
CRDS = yaml.safe_load(Path(__file__).with_name("crds.yaml").read_text())
KSERVE = list(yaml.safe_load_all((ROOT / "deploy" / "kserve" / "inflight.yaml").read_text()))
COMPOSE_FOLDER = ROOT / "deploy" / "compose"
COMPOSE = yaml.safe_load((COMPOSE_FOLDER / "compose.yaml").read_text())
ENVOY = ROOT / "deploy" / "envoy" / "envoy.yaml"
MODEL, RUNTIME, SERVICE = KSERVE


def test_kserves_manifests_are_valid() -> None:
    kubernetes_validate.validate(MODEL, "1.37", strict=True)
    for manifest in (RUNTIME, SERVICE):
        schema = CRDS[f"{manifest['apiVersion']}/{manifest['kind']}"]
        jsonschema.validate(manifest["spec"], {"definitions": CRDS["definitions"], **schema})
    pod = {"containers": RUNTIME["spec"]["containers"], "volumes": RUNTIME["spec"]["volumes"]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "predictor"}, "spec": pod}, "1.37", strict=True
    )


def code(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[:1] not in ("", "#")]


def test_kserve_serves_a_model_that_the_backend_loads() -> None:
    settings = json.loads(MODEL["data"]["model.json"])
    EngineConfig.from_dict(settings)
    assert settings["model"] == "/mnt/models", "where the storage initializer puts it"
    assert code(MODEL["data"]["config.pbtxt"]) == code(CONFIG_PBTXT)
    (container,) = RUNTIME["spec"]["containers"]
    assert container["name"] == "kserve-container", "KServe looks for this name"
    assert {"--model-repository=/repository", "--model-control-mode=none"} <= set(container["args"])
    assert {m["subPath"]: m["mountPath"] for m in container["volumeMounts"] if "subPath" in m} == {
        "config.pbtxt": "/repository/llm/config.pbtxt",
        "model.json": "/repository/llm/1/model.json",
    }
    assert SERVICE["spec"]["predictor"]["model"]["runtime"] == RUNTIME["metadata"]["name"]


def test_kserves_traffic_and_probes_go_to_the_gateway() -> None:
    (container,) = RUNTIME["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    (port,) = container["ports"]
    assert environment["INFLIGHT_OPENAI_PORT"]["value"] == str(port["containerPort"])
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/ready", "port": port["containerPort"]}
    assert container["livenessProbe"]["exec"]["command"] == ["inflight-alive", "llm"]
    assert "value" not in environment["INFLIGHT_API_KEY"]


def test_kserves_grace_period_covers_the_drain() -> None:
    (container,) = RUNTIME["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    waited, drained = map(int, re.fullmatch(r"sleep (\d+); exec inflight-drain (\d+)", command).groups())  # type: ignore[union-attr]
    timeout = json.loads(MODEL["data"]["model.json"])["drain_timeout"]
    assert timeout < drained and SERVICE["spec"]["predictor"]["terminationGracePeriodSeconds"] >= waited + drained + 10
    assert f"--exit-timeout-secs={drained}" in container["args"]


def services(prefix: str) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in COMPOSE["services"].items() if name.startswith(prefix)}


def test_compose_runs_three_tritons_that_drain_before_they_are_killed() -> None:
    assert set(services("triton-")) == {"triton-1", "triton-2", "triton-3"}
    for one in services("triton-").values():
        assert one["image"] == "inflight" and (COMPOSE_FOLDER / one["build"]).resolve() == ROOT
        assert one["environment"]["INFLIGHT_OPENAI_PORT"] == ""
        assert one["healthcheck"]["test"][1] in {path.name for path in (ROOT / "deploy" / "container").iterdir()}
        assert int(one["stop_grace_period"].rstrip("s")) > EngineConfig(model="x").drain_timeout + 10


def test_compose_asks_for_gpus_only_in_a_file_of_their_own() -> None:
    """Docker refuses to start a container whose device the machine lacks."""
    assert "nvidia" not in json.dumps(COMPOSE)
    extra = yaml.safe_load((COMPOSE_FOLDER / "compose.gpu.yaml").read_text())
    assert set(extra) == {"services"} and set(extra["services"]) == set(services("triton-"))
    asked = [one["deploy"]["resources"]["reservations"]["devices"] for one in extra["services"].values()]
    assert [device["device_ids"] for (device,) in asked] == [["0"], ["1"], ["2"]], "no two share one"
    assert all((device["driver"], device["capabilities"]) == ("nvidia", ["gpu"]) for (device,) in asked)


def test_every_gateway_of_compose_lists_every_triton_its_own_first() -> None:
    app = typer.Typer()
    app.command()(gateway)
    assert len(services("replica-")) == 3
    for name, one in services("replica-").items():
        program, *arguments = one["command"]
        given = typer.main.get_command(app).make_context(program, list(arguments)).params
        addresses = [f"{triton}:8001" for triton in services("triton-")]
        assert given["triton"][0] == f"triton-{name[-1]}:8001" and sorted(given["triton"]) == sorted(addresses)
        assert one["expose"] == [str(given["port"])]
        assert EngineConfig(model="x").drain_timeout < given["exit_timeout"] < int(one["stop_grace_period"].rstrip("s"))


def test_compose_shows_envoy_alone_and_on_this_machine_only() -> None:
    assert [name for name, one in COMPOSE["services"].items() if "ports" in one] == ["envoy"]
    (published,) = COMPOSE["services"]["envoy"]["ports"]
    assert published.startswith("127.0.0.1:")
    assert set(COMPOSE["services"]["envoy"]["depends_on"]) == set(services("replica-"))


def test_envoys_upstreams_are_the_replicas_and_its_port_is_the_one_that_is_published() -> None:
    envoy = COMPOSE["services"]["envoy"]
    source, inside, _ = envoy["volumes"][0].split(":")
    assert (COMPOSE_FOLDER / source).resolve() == ENVOY and inside in envoy["command"]
    config = yaml.safe_load(ENVOY.read_text())["static_resources"]
    (listener,) = config["listeners"]
    assert envoy["ports"][0].rpartition(":")[2] == str(listener["address"]["socket_address"]["port_value"])
    (cluster,) = config["clusters"]
    found = {
        (address["address"], str(address["port_value"]))
        for group in cluster["load_assignment"]["endpoints"]
        for address in [one["endpoint"]["address"]["socket_address"] for one in group["lb_endpoints"]]
    }
    assert found == {(name, one["expose"][0]) for name, one in services("replica-").items()}
