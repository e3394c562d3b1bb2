"""The Helm chart, rendered as `helm template` would, and its manifests by kind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as _kubernetes

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "inflight"
NAMESPACE, RELEASE = "llm", "prod"
FULLNAME = "prod-inflight"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has libyaml
_VALUES = ROOT / "tests" / "deploy" / "values"
CASES: dict[str, Path | None] = {
    "defaults": None,
    "cpu": CHART / "values-cpu.yaml",
    "gpu": CHART / "values-gpu.yaml",
    **{path.stem: path for path in sorted(_VALUES.glob("*.yaml"))},
}

Manifest = dict[str, Any]

_CRDS = yaml.load((ROOT / "tests" / "deploy" / "crds.yaml").read_text(), _LOADER)

# Two models in one release; not a case, as most cases have one workload.
MODELS: dict[str, Any] = yaml.load((_VALUES / "several" / "models.yaml").read_text(), _LOADER)


def values_of(case: str) -> dict[str, Any]:
    """The values of a case, as a file gives them."""
    path = CASES[case]
    return yaml.load(path.read_text(), _LOADER) if path else {}


def render(values: dict[str, Any], chart_folder: Path = CHART) -> list[Manifest]:
    """Manifests of the chart with these values.

    Raises:
        helm_python.HelmError: the values are refused.
    """
    with helm_python.Chart.load(chart_folder) as chart:
        chart.validate_schema(values)  # as an install does, and `render` does not
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.load_all(text, _LOADER) if found]


def notes(values: dict[str, Any]) -> str:
    """The text that `helm install` prints with these values."""
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values, name=RELEASE, namespace=NAMESPACE)["inflight/templates/NOTES.txt"]


@functools.cache
def _rendered(case: str) -> list[Manifest]:
    return render(values_of(case))


def manifests(case: str) -> list[Manifest]:
    """A copy of a case's manifests, which the caller can change."""
    return copy.deepcopy(_rendered(case))


# Files that are read anew for each manifest otherwise: half of the time.
_kubernetes.schema_contents = functools.cache(_kubernetes.schema_contents)
_kubernetes.all_versions = functools.cache(_kubernetes.all_versions)


@functools.cache
def _resource(name: str) -> Any:
    """The validator of a custom resource's `spec`; raises `jsonschema.SchemaError`."""
    schema = {"definitions": _CRDS["definitions"], **_CRDS[name]}
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def validate(manifest: dict[str, Any], version: str = "1.37") -> None:
    """Check a manifest as strictly as `kubectl apply --validate=strict`."""
    name = f"{manifest['apiVersion']}/{manifest['kind']}"
    if name in _CRDS:
        _resource(name).validate(manifest["spec"])
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}  # for its metadata
    kubernetes_validate.validate(manifest, version, strict=True)


def of_kind(found: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in found if one["kind"] in kinds]


def only(found: list[Manifest], *kinds: str, name: str = FULLNAME) -> Manifest:
    """The manifest with this name, of these kinds."""
    (one,) = [one for one in of_kind(found, *kinds) if one["metadata"]["name"] == name]
    return one


def server(found: list[Manifest]) -> Manifest:
    """The workload of Triton and the gateway."""
    return only(found, "Deployment", "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    """The pod template of a workload: `metadata` and `spec`."""
    return workload["spec"]["template"]


def containers(workload: Manifest) -> dict[str, Manifest]:
    return {one["name"]: one for one in pod(workload)["spec"]["containers"]}


def ports(workload: Manifest) -> dict[str, int]:
    """Port numbers of a pod by name."""
    found = [port for one in containers(workload).values() for port in one.get("ports", ())]
    named = {port["name"]: port["containerPort"] for port in found}
    assert len(named) == len(found) == len(set(named.values())), "the containers of a pod share its ports"
    return named


def model_json(found: list[Manifest]) -> str:
    return only(found, "ConfigMap", name=f"{FULLNAME}-model")["data"]["model.json"]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def upgraded(before: list[Manifest], after: list[Manifest]) -> list[Manifest]:
    """The Services of a release after an upgrade: the new ones, and old ones that Helm was told to keep."""
    names = {one["metadata"]["name"] for one in of_kind(after, "Service")}
    kept = [one for one in of_kind(before, "Service") if one["metadata"]["name"] not in names]
    policy = "helm.sh/resource-policy"
    return of_kind(after, "Service") + [
        one for one in kept if one["metadata"].get("annotations", {}).get(policy) == "keep"
    ]


def behind(address: str, services: list[Manifest], workloads: list[Manifest]) -> list[Manifest]:
    """The workloads whose pods a headless Service's name leads to: `SERVICE:PORT` or `HOST.SERVICE:PORT`."""
    host, _, name = address.rpartition(":")[0].rpartition(".")
    (service,) = [one for one in services if one["metadata"]["name"] == name]
    assert service["spec"]["clusterIP"] == "None" and not service["spec"].get("publishNotReadyAddresses")
    assert int(address.rpartition(":")[2]) == service["spec"]["ports"][0]["port"]
    found = [one for one in workloads if selects(service["spec"]["selector"], pod_labels(one))]
    # A StatefulSet gives each pod a host name of its own.
    named = [one for one in found if one["kind"] == "Deployment" and pod(one)["spec"].get("subdomain") == name]
    return [one for one in named if pod(one)["spec"]["hostname"] == host] if host else found


def triggers(found: list[Manifest]) -> Iterator[tuple[str, str]]:
    """(name, query) of KEDA's triggers."""
    for one in of_kind(found, "ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            yield trigger["name"], trigger["metadata"]["query"]


def pod_labels(workload: Manifest) -> dict[str, str]:
    return pod(workload)["metadata"]["labels"]


def flag(container: Manifest, name: str) -> str:
    """The value of `--name=value`."""
    (value,) = [text.partition("=")[2] for text in container["args"] if text.startswith(f"--{name}=")]
    return value
