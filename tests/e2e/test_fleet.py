"""Two replicas behind the gateway's own routing, Envoy and vllm-router: kills lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_fronts import FRONTS, REQUESTS, USAGE, ask_all, client, requests, start_front, start_fronts, undisturbed
from nightly import nightly_but
from processes_of import tries
from replicas import Answer, Fleet, Process, metric, step_until_begun, until

HOME = 'inflight_gateway_routed_requests_total.*why="home"'
FAILOVER = 'inflight_gateway_routed_requests_total.*why="failover"'


@pytest.fixture(scope="module")
def fronts(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Process]:
    """Every way into the fleet that this machine has."""
    return start_fronts(fleet, tmp_path_factory.mktemp("fronts"))


@pytest.fixture
def front(request: pytest.FixtureRequest, fronts: dict[str, Process], fleet: Fleet, tmp_path: Path) -> str:
    """The parameter's name, if this machine has that front."""
    if request.param not in fronts:
        start_front(request.param, fleet, tmp_path)  # skips, and says why
    return str(request.param)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client() as http:
        yield http


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[Any]:
    return undisturbed(fleet.gateways[0].url)


def open_requests(fleet: Fleet) -> list[float]:
    """At each replica's gateway."""
    return [metric(one.url, "inflight_gateway_open_requests") for one in fleet.gateways]


# -- undisturbed ---------------------------------------------------------------------------


@pytest.mark.parametrize("front", FRONTS, indirect=True)
async def test_every_front_passes_on_every_kind_of_request(
    front: str, fronts: dict[str, Process], http: httpx.AsyncClient, expected: list[Any]
) -> None:
    assert await ask_all(http, fronts[front].url, requests(front)) == [expected[one] for one in requests(front)]
    assert "demo" in (await http.get(f"{fronts[front].url}/v1/models")).text


async def test_requests_with_one_prefix_meet_in_the_cache_of_one_server(
    fronts: dict[str, Process], http: httpx.AsyncClient
) -> None:
    gateway = fronts["gateway"]
    await ask_prefixes_at_home(http, gateway)
    homes, cached = metric(gateway.url, HOME), []
    for number in range(4):
        body = {"prompt": "The list of names. " * 60 + str(number), "max_tokens": 1}
        usage = (await http.post(f"{gateway.url}/v1/completions", json=body)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) > usage["prompt_tokens"] * 0.8
    assert metric(gateway.url, HOME) == homes + 4


# -- kills ---------------------------------------------------------------------------------


async def ask_whole(http: httpx.AsyncClient, front: Process) -> str:
    path, body = REQUESTS[0]
    answer = await http.post(front.url + path, json={key: value for key, value in body.items() if key not in USAGE})
    return answer.json()["choices"][0]["text"]


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


@pytest.mark.parametrize("front", ["envoy", "router"], indirect=True)
async def test_when_a_gateway_is_killed_an_answer_that_has_not_begun_begins_at_another(
    front: str, fronts: dict[str, Process], fleet: Fleet, http: httpx.AsyncClient, expected: list[Any]
) -> None:
    """No engine runs until the gateway is dead, so no answer has begun."""
    url = fronts[front].url
    numbers = requests(front) * 2
    for index in range(len(fleet.servers)):
        fleet.engine(index).suspend()
    tasks = [asyncio.create_task(Answer(url, *REQUESTS[number]).read(http)) for number in numbers]
    await until(lambda: sum(open_requests(fleet)) == len(tasks))
    counts = open_requests(fleet)
    victim = counts.index(max(counts))
    fleet.gateways[victim].stop(signal.SIGKILL)
    for index in range(len(fleet.servers)):
        fleet.engine(index).resume()
    try:
        assert await asyncio.gather(*tasks) == [expected[number] for number in numbers]
    finally:
        fleet.gateways[victim].start()


@pytest.mark.parametrize("front", nightly_but(["envoy"], ["envoy", "router"]), indirect=True)
async def test_when_a_gateway_is_killed_an_answer_that_has_begun_breaks_off_visibly(
    front: str, fronts: dict[str, Process], fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Nothing between client and gateway can continue it; no client takes it for complete."""
    url = fronts[front].url
    path, body = REQUESTS[0]
    for _ in tries():
        for index in range(len(fleet.servers)):
            fleet.engine(index).suspend()
        answer = Answer(url, path, {**body, "max_tokens": 1500})
        task = asyncio.create_task(answer.read(http))
        await until(lambda: sum(open_requests(fleet)) == 1)
        victim = open_requests(fleet).index(1)
        await step_until_begun(fleet, victim, lambda: [answer])  # noqa: B023
        fleet.gateways[victim].stop(signal.SIGKILL)
        for index in range(len(fleet.servers)):
            fleet.engine(index).resume()
        try:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                await task  # it is complete only if it was before the gateway died
            assert answer.events
        finally:
            fleet.gateways[victim].start()
        if not answer.ended_well:
            return
        assert answer.result[1]["completion_tokens"] == 1500, "it was cut off, and said to be complete"
    pytest.fail("every answer came to its end")


async def test_streams_of_a_server_that_is_killed_go_on_elsewhere(
    fleet: Fleet, fronts: dict[str, Process], http: httpx.AsyncClient, expected: list[Any]
) -> None:
    """All kinds of requests through all fronts at once: those of the victim have begun, and are far from their end.

    The victim stays dead, so what needs two servers comes before this.
    """
    (victim,) = fleet.own
    for _ in tries():
        for index in range(len(fleet.servers)):
            fleet.engine(index).suspend()
        asked = [(front, number) for front in fronts for number in requests(front)]
        answers = [Answer(fronts[front].url, *REQUESTS[number]) for front, number in asked]
        tasks = [asyncio.create_task(answer.read(http)) for answer in answers]
        # Without streaming, a gateway that loses its server has sent nothing, and asks the next one.
        whole = [asyncio.create_task(ask_whole(http, one)) for one in (*fronts.values(), *fleet.gateways)]
        counts = [0]
        while sum(counts) < len(tasks) + len(whole):
            counts = await asyncio.to_thread(fleet.open_requests)
        assert counts[victim], "the victim has no requests"
        for index in range(len(fleet.servers)):
            if index != victim:
                fleet.engine(index).resume()
        await step_until_begun(fleet, victim, lambda: answers)  # noqa: B023
        if (await asyncio.to_thread(fleet.open_requests))[victim] == counts[victim]:
            break
        fleet.engine(victim).resume()
        await asyncio.gather(*tasks, *whole)
    else:
        pytest.fail("a request of the victim had ended in every try")
    fleet.kill(victim)
    assert await asyncio.gather(*tasks) == [expected[number] for _, number in asked]
    assert set(await asyncio.gather(*whole)) == {expected[0][0][0]["text"]}
    resumed = [
        metric(one.url, "inflight_gateway_resumed_streams_total") for one in (fronts["gateway"], *fleet.gateways)
    ]
    assert sum(resumed) > 0
    await ask_prefixes(http, fronts["gateway"])
    assert metric(fronts["gateway"].url, FAILOVER) > 0


@pytest.mark.nightly
async def test_a_server_that_returns_is_asked_for_its_prefixes_again(
    fleet: Fleet, fronts: dict[str, Process], http: httpx.AsyncClient
) -> None:
    (victim,) = fleet.own
    if fleet.servers[victim].is_running():
        fleet.kill(victim)
    await ask_prefixes(http, fronts["gateway"])  # fails there, and is served elsewhere
    at_home = HOME.replace(".*", f'.*"{fleet.addresses[victim]}".*')
    before = metric(fronts["gateway"].url, at_home)
    fleet.revive(victim)
    while metric(fronts["gateway"].url, at_home) == before:  # it rests after its failures
        await ask_prefixes(http, fronts["gateway"])
        await asyncio.sleep(0.2)
