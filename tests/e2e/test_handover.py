"""Prompts that one tritonserver computes and another one continues have the answers of a single server."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from handover_rig import MODEL, check_answers, fronts, outcomes, responds, send_all, send_until
from model_entries import loaded, write_entry
from processes_of import engine_process
from replicas import Answer, until
from tier_load import conversation
from wire import gauges

from inflight_tools.launcher import TritonServer

pytestmark = pytest.mark.nightly


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


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as client:
        yield client


async def test_answers_equal_those_of_one_server(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    with fronts(decoding, prefill) as (alone, both):
        for seed in range(10):
            await check_answers(http, both, alone, seed, seed % 3 == 2)
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
            await check_answers(http, both, alone, seed, strike=strike)

        for seed in range(200, 204):
            await check(seed, lambda: engine_process(prefill, MODEL).kill())
            await until(lambda: responds(prefill))
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
