"""Prompts that one tritonserver computes and another one continues have the answers of a single server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fleet_fronts import CHAT, FORMAT, TOOL, USAGE
from model_entries import loaded, write_entry
from processes_of import engine_process
from replicas import Answer, gateway, metric, until
from tier_load import conversation
from wire import gauges

from inflight_client import Client
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

pytestmark = pytest.mark.nightly

MODEL = "tiered"
WORDS = ["Return", "a", "list", "of", "naïve", "你好", "names", "def", "main", "x"]
LONG = {"max_tokens": 40, "ignore_eos": True}


def words(seed: int, count: int = 500) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


def chat(seed: int) -> list[dict[str, str]]:
    return [CHAT[0], {"role": "user", "content": words(seed)}]


def requests(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """With prompts that no other request has."""
    k = 100 * seed
    logprobs, stops = {"logprobs": True, "top_logprobs": 2}, {"stop_token_ids": [11, 300]}
    return [
        ("/v1/completions", {"prompt": conversation(k + 1), "temperature": 0, **LONG, **USAGE}),
        ("/v1/completions", {"prompt": words(k + 2), "seed": 8, "logprobs": 2, **LONG, **USAGE}),
        ("/v1/completions", {"prompt": conversation(k + 3)[:900], "seed": 7, "return_token_ids": True, **LONG}),
        ("/v1/completions", {"prompt": words(k + 4), "seed": 3, "n": 2, "echo": True, **LONG}),
        ("/v1/completions", {"prompt": conversation(k + 5), "seed": 2, "max_tokens": 1, "ignore_eos": True, **USAGE}),
        ("/v1/completions", {"prompt": words(k + 6), "seed": 3, "allowed_token_ids": [11, 300], **stops, **USAGE}),
        ("/v1/completions", {"prompt": words(k + 7), "seed": 5, "frequency_penalty": 1.5, "min_tokens": 9, **LONG}),
        ("/v1/chat/completions", {"messages": chat(k + 8), "seed": 9, **logprobs, **LONG}),
        ("/v1/chat/completions", {"messages": chat(k + 9), "seed": 1, "response_format": FORMAT, **USAGE}),
        ("/v1/chat/completions", {"messages": chat(k + 10), "seed": 2, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/responses", {"input": words(k + 11), "temperature": 0, "max_output_tokens": 40, "ignore_eos": True}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the model on both servers."""
    folder = tmp_path_factory.mktemp("kv") / "tier"
    return {"kv_tiers": [{"type": "disk", "path": str(folder), "size": "1GiB"}]}


@pytest.fixture(scope="module")
def decoding(triton: TritonServer, options: dict[str, Any]) -> Iterator[TritonServer]:
    with loaded(triton, **{MODEL: options}):
        yield triton


@pytest.fixture(scope="module")
def prefill(
    triton_installed: None, options: dict[str, Any], keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("prefill")
    write_entry(repository, MODEL, **options)
    server = TritonServer(repository, model_control_mode="explicit", load_models=[MODEL], env=keeping)
    server.start()
    server.wait_ready()
    yield server
    server.kill()


@contextlib.contextmanager
def front(tritons: list[TritonServer], *more: str) -> Iterator[str]:
    process = gateway([server.grpc_address for server in tritons], "--tool-call-parser", "hermes", *more)
    try:
        yield process.start().url
    finally:
        process.stop()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as client:
        yield client


async def answers(http: httpx.AsyncClient, url: str, seed: int, whole: bool = False) -> list[Any]:
    if not whole:
        return await asyncio.gather(
            *[Answer(url, path, body | {"model": MODEL}).read(http) for path, body in requests(seed)]
        )
    found = []
    for path, body in requests(seed):
        body = {key: value for key, value in body.items() if key != "stream_options"}
        answer = (await http.post(url + path, json=body | {"model": MODEL})).json()
        found.append((answer.get("choices") or answer.get("output"), answer.get("usage")))
    return found


@contextlib.contextmanager
def fronts(decoding: TritonServer, prefill: TritonServer) -> Iterator[tuple[str, str]]:
    """Gateways in front of one server, and of both."""
    more = ["--prefill-triton", prefill.grpc_address, "--handover", "64"]
    with front([decoding]) as alone, front([decoding], *more) as both:
        yield alone, both


def outcomes(url: str, outcome: str) -> float:
    return metric(url, rf'inflight_gateway_handovers_total{{outcome="{outcome}"}}')


def send_all(server: TritonServer, number: int) -> None:
    """A signal to the server and its model's processes."""
    assert server.process is not None
    for pid in session_members(server.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def test_answers_equal_those_of_one_server(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    with fronts(decoding, prefill) as (alone, both):
        for seed in range(10):
            whole = seed % 3 == 2
            found = await answers(http, both, seed, whole)
            for one, other, request in zip(found, await answers(http, alone, seed, whole), requests(seed)):
                assert (without_cached(one) == without_cached(other)) if whole else one == other, request
        # Of 80 and 10: on a busy machine a prompt can be late, and then some others are not handed over.
        assert outcomes(both, "handed_over") >= 40 and outcomes(both, "ended") >= 2
        assert not outcomes(both, "failed")


async def test_kv_comes_from_the_other_server(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    """Of prompts that this server has never had.  It computes so fast that it does not wait for all of them."""

    def hits() -> float:
        return gauges(decoding.metrics_address, MODEL)["vllm:external_prefix_cache_hits_total"]

    with fronts(decoding, prefill) as (_, both):
        before = hits()
        for seed in range(100, 200):
            body = {"model": MODEL, "prompt": conversation(seed, 1900), "max_tokens": 8, "ignore_eos": True}
            await Answer(both, "/v1/completions", body).read(http)
            if hits() - before >= 1024:
                break
        assert hits() - before >= 1024
        assert outcomes(both, "handed_over")


async def test_no_request_fails_whatever_happens_to_a_server(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    """The engine for prompts is killed, the server is stopped, the engine that generates is killed, the server dies."""
    with fronts(decoding, prefill) as (alone, both):

        async def check(seed: int, strike: Callable[[], object]) -> None:
            found = asyncio.create_task(answers(http, both, seed))
            await asyncio.sleep(random.Random(seed).random() / 3)
            strike()
            got = await found
            for one, other, request in zip(got, await answers(http, alone, seed), requests(seed)):
                assert one == other, request

        for seed in range(200, 204):
            await check(seed, lambda: engine_process(prefill, MODEL).kill())
            await until(lambda: prefill_answers(prefill))
        for seed in range(204, 207):
            await check(seed, lambda: engine_process(decoding, MODEL).kill())
        try:
            await check(207, lambda: send_all(prefill, signal.SIGSTOP))
            await check(208, lambda: None)
            assert outcomes(both, "late")
        finally:
            send_all(prefill, signal.SIGCONT)
        await send_until(http, both, "handed_over", 300)  # it rests no more
        await check(209, prefill.kill)
        await check(210, lambda: None)
        await send_until(http, both, "failed", 600)
        assert outcomes(both, "busy")


async def send_until(http: httpx.AsyncClient, url: str, outcome: str, seed: int) -> None:
    """Send requests with new prompts, from this seed on, until one more has this outcome."""
    before = outcomes(url, outcome)
    while outcomes(url, outcome) == before:
        body = {"model": MODEL, "prompt": words(seed), "max_tokens": 8, "ignore_eos": True}
        await Answer(url, "/v1/completions", body).read(http)
        seed += 1


def prefill_answers(server: TritonServer) -> bool:
    with Client(server.grpc_address) as client:
        return client.responds(MODEL)


def without_cached(answer: Any) -> Any:
    """A whole answer without ids, which are random, and the numbers of tokens that were cached."""
    choices, usage = answer
    counts = {name: value for name, value in (usage or {}).items() if isinstance(value, int)}
    return re.sub(r'"(id|call_id)": "[^"]*"', "", json.dumps(choices)), counts
