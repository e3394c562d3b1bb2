"""The Helm chart, rendered as `helm template` would, and its manifests by kind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "inflight"
NAMESPACE, RELEASE = "llm", "prod"
FULLNAME = "prod-inflight"

_VALUES = ROOT / "tests" / "deploy" / "values"
CASES: dict[str, Path | None] = {
    "defaults": None,
    "cpu": CHART / "values-cpu.yaml",
    "gpu": CHART / "values-gpu.yaml",
    **{path.stem: path for path in sorted(_VALUES.glob("*.yaml"))},
}

Manifest = dict[str, Any]


def values_of(case: str) -> dict[str, Any]:
    """The values of a case, as a file gives them."""
    path = CASES[case]
    return yaml.safe_load(path.read_text()) if path else {}


def render(values: dict[str, Any]) -> list[Manifest]:
    """Manifests of the chart with these values.

    Raises:
        helm_python.HelmError: the values are refused.
    """
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)  # as an install does, and `render` does not
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


@functools.cache
def _rendered(case: str) -> list[Manifest]:
    return render(values_of(case))


def manifests(case: str) -> list[Manifest]:
    """A copy of a case's manifests, which the caller can change."""
    return copy.deepcopy(_rendered(case))


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
