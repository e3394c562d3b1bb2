"""Prompts that one tritonserver computes and another one continues have the answers of a single server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_fronts import CHAT, FORMAT, TOOL, USAGE
from model_entries import copy_entry, loaded, write_entry
from processes_of import engine_process
from replicas import Answer, Process, gateway, metric, until
from tier_load import conversation
from wire import gauges

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
    """With prompts that no other seed has."""
    ids, logprobs = conversation(seed), {"logprobs": True, "top_logprobs": 2}
    return [
        ("/v1/completions", {"prompt": ids, "temperature": 0, **LONG, **USAGE}),
        ("/v1/completions", {"prompt": words(seed), "seed": 8, "logprobs": 2, **LONG, **USAGE}),
        ("/v1/completions", {"prompt": ids[:900], "seed": 7, "return_token_ids": True, "temperature": 1.4, **LONG}),
        ("/v1/completions", {"prompt": words(seed), "seed": 3, "n": 2, "echo": True, **LONG}),
        ("/v1/completions", {"prompt": ids, "seed": 2, "max_tokens": 1, "ignore_eos": True, **USAGE}),
        ("/v1/completions", {"prompt": words(seed), "seed": 3, "allowed_token_ids": [11, 300], "stop_token_ids": [11, 300], **USAGE}),
        ("/v1/completions", {"prompt": words(seed), "seed": 5, "frequency_penalty": 1.5, "repetition_penalty": 1.2, **LONG}),
        ("/v1/chat/completions", {"messages": chat(seed), "seed": 9, **logprobs, **LONG}),
        ("/v1/chat/completions", {"messages": chat(seed), "seed": 1, "response_format": FORMAT, **USAGE}),
        ("/v1/chat/completions", {"messages": chat(seed), "seed": 2, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/responses", {"input": words(seed), "temperature": 0, "max_output_tokens": 40, "ignore_eos": True}),
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


async def test_answers_equal_those_of_one_server(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    more = ["--prefill-triton", prefill.grpc_address, "--handover", "64"]
    with front([decoding]) as alone, front([decoding], *more) as both:
        for seed in range(3):
            found = await answers(http, both, seed)
            expected = await answers(http, alone, seed)
            for one, other, request in zip(found, expected, requests(seed)):
                assert one == other, request
        print(gauges(decoding.metrics_address, MODEL))
        print(httpx.get(f"{both}/metrics").text)
        assert 0
