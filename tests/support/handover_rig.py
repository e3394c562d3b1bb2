"""Requests whose prompts one tritonserver computes and whose answers another one generates, and gateways for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from fleet_fronts import CHAT, FORMAT, TOOL, USAGE
from replicas import Answer, gateway, metric
from tier_load import conversation

from inflight_client import Client
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

__all__ = [
    "MODEL",
    "check_answers",
    "front",
    "fronts",
    "outcomes",
    "requests",
    "responds",
    "send_all",
    "send_until",
    "words",
]

MODEL = "tiered"
_WORDS = ["Return", "a", "list", "of", "naïve", "你好", "names", "def", "main", "x"]
_LONG = {"max_tokens": 40, "ignore_eos": True}


def words(seed: int, count: int = 500) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(_WORDS) for _ in range(count))


def _chat(seed: int) -> list[dict[str, str]]:
    return [CHAT[0], {"role": "user", "content": words(seed)}]


def requests(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """With prompts that no other request has."""
    k = 100 * seed
    logprobs, stops = {"logprobs": True, "top_logprobs": 2}, {"stop_token_ids": [11, 300]}
    return [
        ("/v1/completions", {"prompt": conversation(k + 1), "temperature": 0, **_LONG, **USAGE}),
        ("/v1/completions", {"prompt": words(k + 2), "seed": 8, "logprobs": 2, **_LONG, **USAGE}),
        ("/v1/completions", {"prompt": conversation(k + 3)[:900], "seed": 7, "return_token_ids": True, **_LONG}),
        ("/v1/completions", {"prompt": words(k + 4), "seed": 3, "n": 2, "echo": True, **_LONG}),
        ("/v1/completions", {"prompt": conversation(k + 5), "seed": 2, "max_tokens": 1, "ignore_eos": True, **USAGE}),
        ("/v1/completions", {"prompt": words(k + 6), "seed": 3, "allowed_token_ids": [11, 300], **stops, **USAGE}),
        ("/v1/completions", {"prompt": words(k + 7), "seed": 5, "frequency_penalty": 1.5, "min_tokens": 9, **_LONG}),
        ("/v1/chat/completions", {"messages": _chat(k + 8), "seed": 9, **logprobs, **_LONG}),
        ("/v1/chat/completions", {"messages": _chat(k + 9), "seed": 1, "response_format": FORMAT, **USAGE}),
        ("/v1/chat/completions", {"messages": _chat(k + 10), "seed": 2, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/responses", {"input": words(k + 11), "temperature": 0, "max_output_tokens": 40, "ignore_eos": True}),
    ]  # fmt: skip


@contextlib.contextmanager
def front(tritons: list[TritonServer], *more: str) -> Iterator[str]:
    process = gateway([server.grpc_address for server in tritons], "--tool-call-parser", "hermes", *more)
    try:
        yield process.start().url
    finally:
        process.stop()


async def check_answers(
    http: httpx.AsyncClient, both: str, alone: str, seed: int, whole: bool = False, strike: Callable[[], Any] = bool
) -> None:
    """The answers of both servers equal those of one, whose KV neither of them has.

    Args:
        both, alone: URLs of gateways.
        whole: not as streams.
        strike: called while the answers of both are on their way.
    """
    found = asyncio.create_task(_answers(http, both, seed, whole))
    await asyncio.sleep(random.Random(seed).random() / 3)
    strike()
    got = await found
    for one, other, request in zip(got, await _answers(http, alone, seed, whole, cache_salt="alone"), requests(seed)):
        assert one == other, request


async def _answers(http: httpx.AsyncClient, url: str, seed: int, whole: bool, **more: Any) -> list[Any]:
    if not whole:
        sent = [Answer(url, path, body | {"model": MODEL} | more) for path, body in requests(seed)]
        return await asyncio.gather(*[one.read(http) for one in sent])
    found = []
    for path, body in requests(seed):
        body = {key: value for key, value in body.items() if key != "stream_options"}
        answer = (await http.post(url + path, json=body | {"model": MODEL} | more)).json()
        found.append(_without_cached(answer.get("choices") or answer.get("output"), answer.get("usage")))
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


async def send_until(http: httpx.AsyncClient, url: str, outcome: str, seed: int) -> None:
    """Send requests with new prompts, from this seed on, until one more has this outcome."""
    before = outcomes(url, outcome)
    while outcomes(url, outcome) == before:
        body = {"model": MODEL, "prompt": words(seed), "max_tokens": 8, "ignore_eos": True}
        await Answer(url, "/v1/completions", body).read(http)
        seed += 1


def responds(server: TritonServer) -> bool:
    with Client(server.grpc_address) as client:
        return client.responds(MODEL)


def _without_cached(choices: Any, usage: Any) -> Any:
    """A whole answer without ids, which are random, and the numbers of tokens that were cached."""
    counts = {name: value for name, value in (usage or {}).items() if isinstance(value, int)}
    return re.sub(r'"(id|call_id)": "[^"]*"', "", json.dumps(choices)), counts
