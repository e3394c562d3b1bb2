"""The endpoints that a run puts under load."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtest.clients import GrpcClient, OpenAIClient, SseClient, connect, find_kind
from loadtest.errors import LoadTestError
from loadtest.server import BASELINE, INFLIGHT, Endpoints

__all__ = ["Target", "find_targets", "server_targets", "sole_model"]

_SPOKEN = {"grpc": "Triton's gRPC", "http": "Triton's HTTP", "openai": "OpenAI's API"}


@dataclass(frozen=True)
class Target:
    """A model at an endpoint.

    Attributes:
        key: in `report.json` and in the names of files; unique in a run.
        name: in the report.
        kind: what it speaks, see `clients.connect`.
        address: for `clients.connect`.
        model: name on the server.
        metrics: URL of its Prometheus metrics; "" for none.
        api_key: None if it needs none.
        traits: what its client found out.
        pid: its process, if we started it.
    """

    key: str
    name: str
    kind: str
    address: str
    model: str
    metrics: str = ""
    api_key: str | None = field(default=None, repr=False)
    traits: dict[str, Any] = field(default_factory=dict)
    pid: int | None = None

    @property
    def about(self) -> str:
        """Where it is."""
        return f"model {self.model} at {self.address} ({_SPOKEN[self.kind]})"

    def client(self) -> GrpcClient | SseClient | OpenAIClient:
        """A client of this endpoint."""
        return connect(self.kind, self.address, self.model, self.api_key, self.traits)


def server_targets(endpoints: Endpoints, protocol: str, models: tuple[str, str]) -> tuple[Target, Target]:
    """Inflight's model and its baseline on one Triton."""
    address = endpoints.grpc if protocol == "grpc" else endpoints.http
    metrics, pid = f"http://{endpoints.metrics}/metrics", endpoints.pid
    ours, theirs = models
    return (
        Target(INFLIGHT, "Inflight", protocol, address, ours, metrics, pid=pid),
        Target(BASELINE, "Baseline", protocol, address, theirs, metrics, pid=pid),
    )


def find_targets(
    urls: list[str], kinds: list[str], names: list[str], models: list[str], api_keys: list[str], metrics: list[str]
) -> tuple[Target, ...]:
    """One or two endpoints side by side; the other lists are empty or have a value for each URL, "" for its default.

    Raises:
        LoadTestError: a list of another length, equal names, or an endpoint that does not answer.
    """
    if len(urls) > 2:
        raise LoadTestError(f"--url is given {len(urls)} times; a report compares at most two endpoints")
    options = {"kind": kinds, "name": names, "model": models, "api-key": api_keys, "metrics": metrics}
    for option, values in options.items():
        if len(values) not in (0, len(urls)):
            raise LoadTestError(f"--{option} is given {len(values)} times, --url {len(urls)} times; give one for each")
    blank = [""] * len(urls)
    rows = zip(urls, kinds or blank, models or blank, api_keys or blank, metrics or blank)
    targets = [_find(*row) for row in rows]
    if not names:
        found = [target.model for target in targets]
        names = found if len(set(found)) == len(found) else [target.address for target in targets]
        if len(set(names)) < len(names):
            names = [f"{target.address} ({number})" for number, target in enumerate(targets, 1)]
    if len(set(names)) < len(names) or not all(names):
        raise LoadTestError(f"--name: {', '.join(map(repr, names))}; give each endpoint a name of its own")
    return tuple(dataclasses.replace(target, key=name, name=name) for target, name in zip(targets, names))


def _find(url: str, kind: str, model: str, api_key: str, metrics: str) -> Target:
    kind, address = find_kind(url, kind)
    key = api_key or None
    model = model or sole_model(connect(kind, address, "", key), address)
    if metrics and "://" not in metrics:
        metrics = f"http://{metrics}/metrics"
    return Target("", "", kind, address, model, metrics or _metrics_of(kind, address), key)


def _metrics_of(kind: str, address: str) -> str:
    """Where such a server usually has its metrics: Triton on the port after gRPC's, others beside their API."""
    if kind != "openai":
        try:
            return f"http://{Endpoints.at(address)[0].metrics}/metrics"
        except LoadTestError:
            return ""  # no port: Triton behind a proxy
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return f"{parts.scheme}://{parts.netloc}/metrics"


def sole_model(client: GrpcClient | SseClient | OpenAIClient, address: str) -> str:
    """The name of the server's only model.

    Raises:
        LoadTestError: it has none, or several.
    """
    models = client.models()
    if len(models) != 1:
        listed = ", ".join(sorted(models)) or "none"
        raise LoadTestError(f"{address} has {len(models)} models ({listed}); choose one with --model")
    return models[0]
