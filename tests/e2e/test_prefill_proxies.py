"""Proxies that give a prompt to one server and the rest to another one, in front of two tritonservers with gateways.

vllm-router is the real program.  llm-d's sidecar, which is written in Go, is played from its source.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_entries import killed_at_the_end, loaded, write_entry
from replicas import Answer, Process, gateway
from tier_load import conversation
from wire import gauges

from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

pytestmark = pytest.mark.nightly

MODEL = "prefilled"
HITS = "vllm:external_prefix_cache_hits_total"
OUTPUT = {"max_tokens": 24, "ignore_eos": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NOWHERE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def words(seed: int) -> str:
    return " ".join(f"name {number}" for number in conversation(seed, 300))


def hits(server: TritonServer) -> float:
    """Tokens read from the other server, as of the last report; a prompt is computed where that seems as fast."""
    return gauges(server.metrics_address, MODEL).get(HITS, 0.0)


def requests(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """With prompts that no other request has."""
    first, second = ([{"role": "user", "content": words(100 * seed + number)}] for number in (3, 4))
    return [
        (COMPLETIONS, {"prompt": words(100 * seed + 1), "temperature": 0, **OUTPUT}),
        (COMPLETIONS, {"prompt": words(100 * seed + 2), "seed": 7, "min_tokens": 9, "stop": ["zz"], **OUTPUT}),
        (CHAT, {"messages": first, "seed": 9, "max_completion_tokens": 24, "ignore_eos": True}),
        (CHAT, {"messages": second, "temperature": 0.7, "seed": 3, "n": 2, **OUTPUT}),
    ]


def rounds(first: int, done: Callable[[], bool]) -> Iterator[int]:
    """Seeds, until `done`: whether an engine reads KV is up to what it measures."""
    for seed in range(first, first + 50):
        yield seed
        if done():
            return
    raise AssertionError("no KV was read")


@pytest.fixture(scope="module")
def listen() -> str:
    return f"127.0.0.1:{pick_ports(1)[0]}"


@pytest.fixture(scope="module")
def prefill(
    triton_installed: None, listen: str, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("prefill")
    write_entry(repository, MODEL, kv_tiers=[{"type": "host", "size": "64MiB"}], kv_listen=listen)
    with killed_at_the_end(
        TritonServer(repository, model_control_mode="explicit", load_models=[MODEL], env=keeping)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def decoding(triton: TritonServer, prefill: TritonServer, listen: str) -> Iterator[TritonServer]:
    with loaded(triton, **{MODEL: {"kv_tiers": [{"type": "peer", "url": f"tcp://{listen}"}]}}):
        yield triton


@pytest.fixture(scope="module")
def fronts(prefill: TritonServer, decoding: TritonServer) -> Iterator[tuple[str, str]]:
    """Gateways in front of the server for prompts and of the other one, which refuse keys that they do not know."""
    with contextlib.ExitStack() as stack:
        processes = [gateway([server.grpc_address], "--strict") for server in (prefill, decoding)]
        for process in processes:
            stack.callback(process.stop)
        yield tuple(process.start().url for process in processes)  # type: ignore[misc]


@contextlib.contextmanager
def router(prefill: str, decode: str) -> Iterator[str]:
    """The real vllm-router, as docs/fleet/routing.md starts it."""
    found = Path(sys.executable).with_name("vllm-router")
    if not found.exists():
        pytest.skip("no vllm-router: pip install vllm-router, which has wheels for Linux on x86-64")
    port, prometheus = pick_ports(2)
    command = [str(found), "--port", str(port), "--prometheus-port", str(prometheus), "--vllm-pd-disaggregation"]
    process = Process([*command, "--prefill", prefill, "--decode", decode, "--policy", "round_robin"], port, "/health")
    try:
        yield process.start().url
    finally:
        process.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_router(
    fronts: tuple[str, str], prefill: TritonServer, decoding: TritonServer, stream: bool
) -> None:
    before = hits(decoding)
    with router(*fronts) as url:
        async with httpx.AsyncClient(timeout=120) as http:
            for seed in rounds(100 + 100 * stream, lambda: hits(decoding) > before):
                for path, body in requests(seed):
                    body = {"model": MODEL, **body}
                    found = await ask(http, url, path, body, stream)
                    assert found == await ask(http, fronts[1], path, body, stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_llm_ds_sidecar(fronts: tuple[str, str], decoding: TritonServer, stream: bool) -> None:
    """Its protocol nixlv2, and its shared storage, which needs no parameters."""
    before = hits(decoding)
    async with httpx.AsyncClient(timeout=120) as http:
        for seed in rounds(300 + 100 * stream, lambda: hits(decoding) > before):
            for number, (path, body) in enumerate(requests(seed)):
                await as_the_sidecar(http, fronts, path, {"model": MODEL, **body}, stream, shares=bool(number % 2))


async def as_the_sidecar(
    http: httpx.AsyncClient, fronts: tuple[str, str], path: str, body: dict[str, Any], stream: bool, shares: bool
) -> None:
    """Send a prompt, and what is left of the answer, which is that of one server."""
    if shares:
        prompt = {**body, "max_tokens": 1, "max_completion_tokens": 1, "cache_hit_threshold": 0}
        prompt.pop("min_tokens", None)  # it sends what Triton refuses, as vLLM does
        rest = {**body, "cache_hit_threshold": 0}
    else:
        limits = dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), 1)
        asked = {"do_remote_decode": True, "do_remote_prefill": False, **NOWHERE}
        prompt = {**body, **limits, "stream": False, "kv_transfer_params": asked}
        rest = dict(body)
    found = await http.post(fronts[0] + path, json=prompt)
    assert found.status_code == 200, found.text
    if not shares:
        rest["kv_transfer_params"] = found.json()["kv_transfer_params"]
    answer = await ask(http, fronts[1], path, rest, stream)
    assert answer == await ask(http, fronts[1], path, body, stream)


async def test_what_the_server_for_prompts_does_not_have_is_computed(fronts: tuple[str, str]) -> None:
    """It was killed meanwhile, or has evicted the prompt; the address of a client gets no connection."""
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        theirs.setblocking(False)
        port = theirs.getsockname()[1]
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port, "remote_block_ids": [1]}
        async with httpx.AsyncClient(timeout=120) as http:
            path, body = requests(500)[0]
            body = {"model": MODEL, **body}
            found = (await http.post(fronts[1] + path, json={**body, "kv_transfer_params": params})).json()
            assert not (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
            assert found["choices"] == (await ask(http, fronts[1], path, body, False))[0]
        with pytest.raises(BlockingIOError):  # no connection waits
            theirs.accept()


async def ask(http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any], stream: bool) -> Any:
    """Choices, and the number of tokens."""
    if stream:
        return await Answer(url, path, body).read(http)
    response = await http.post(url + path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"], {name: count for name, count in answer["usage"].items() if isinstance(count, int)}
