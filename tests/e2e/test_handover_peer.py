"""One tritonserver continues what another one has computed, and reads its KV over a socket, whatever happens then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from handover_rig import (
    MODEL,
    check_answers,
    front,
    fronts,
    outcomes,
    responds,
    send_all,
    send_until,
)
from model_entries import CHECKPOINT, load, loaded, write_entry
from peer_link import PeerLink
from processes_of import engine_process, slowed, stubs, tries
from replicas import Answer, gateway, metric, until
from safetensors.torch import load_file, save_file
from tier_load import conversation
from wire import gauges

from inflight_client import Client
from inflight_tools.launcher import TritonServer

nightly = pytest.mark.nightly

LENGTH = 1900  # tokens of a prompt; its extents have 256, and take 3.7 MB
SHORT = {"max_tokens": 8, "ignore_eos": True}
BEGUN, LONG = 5, {"max_tokens": 140, "ignore_eos": True}  # events of an answer in whose middle something happens


def open_requests(server: TritonServer) -> int:
    """Also while its engine is stopped."""
    with Client(server.grpc_address, model=MODEL) as client:
        return int(json.loads(client.control("stats"))["frontend"]["open_requests"])


@pytest.fixture(scope="module")
def link() -> Iterator[PeerLink]:
    """Between the two engines."""
    with PeerLink() as link:
        yield link


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("secrets")
    for name in ("one", "two"):
        (folder / name).write_text(name * 20)
    return [str(folder / name) for name in ("one", "two")]


def giver(link: PeerLink, secrets: list[str], **more: Any) -> dict[str, Any]:
    """Options of the model whose engine is read."""
    tiers = [{"type": "host", "size": "64MiB"}]
    return {"kv_tiers": tiers, "kv_listen": link.listens, "kv_store_secret_file": secrets[0], **more}


def taker(link: PeerLink, secrets: list[str], **more: Any) -> dict[str, Any]:
    """Options of the model whose engine reads."""
    return {"kv_tiers": [{"type": "peer", "url": link.url}], "kv_store_secret_file": secrets[0], **more}


@pytest.fixture(scope="module")
def decoding(triton: TritonServer, link: PeerLink, secrets: list[str]) -> Iterator[TritonServer]:
    with loaded(triton, **{MODEL: taker(link, secrets)}):
        yield triton


@pytest.fixture
def neighbour(guarded: TritonServer, link: PeerLink, secrets: list[str]) -> Iterator[TritonServer]:
    """A server of other modules that computes prompts; then `prefill` gets its port."""
    with loaded(guarded, **{MODEL: giver(link, secrets)}):
        yield guarded


@pytest.fixture(scope="module")
def start(
    triton_installed: None, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., TritonServer]]:
    """Starts servers, with the options of their model."""
    with contextlib.ExitStack() as ends:

        def started(**options: Any) -> TritonServer:
            repository = tmp_path_factory.mktemp("server")
            write_entry(repository, MODEL, **options)
            server = TritonServer(repository, model_control_mode="explicit", load_models=[MODEL], env=keeping)
            ends.callback(server.kill)
            server.start()
            server.wait_ready()
            return server

        yield started


@pytest.fixture(scope="module")
def prefill(start: Callable[..., TritonServer], link: PeerLink, secrets: list[str]) -> TritonServer:
    """A server that computes prompts, and that tests can kill."""
    return start(**giver(link, secrets))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as client:
        yield client


def count(server: TritonServer, name: str) -> float:
    return gauges(server.metrics_address, MODEL).get(name, 0.0)


def hits(server: TritonServer) -> float:
    return count(server, "vllm:external_prefix_cache_hits_total")


def said(server: TritonServer, seed: int, length: int = LENGTH, **more: Any) -> tuple[list[int], str]:
    """The answer of one server, without cached KV."""
    with Client(server.grpc_address, model=MODEL) as client:
        params = {"temperature": 0.0, **SHORT, **more}
        result = client.generate(input_ids=conversation(seed, length), cache_salt="alone", **params)
        return result.token_ids, result.choices[0].text


def asked(url: str, seed: int, length: int = LENGTH, **more: Any) -> Answer:
    """A request with such a prompt."""
    body = {"model": MODEL, "prompt": conversation(seed, length), "temperature": 0, "return_token_ids": True}
    return Answer(url, "/v1/completions", {**body, **SHORT, **more})


async def same(http: httpx.AsyncClient, url: str, server: TritonServer, seed: int) -> None:
    """The answer that comes through a gateway is that of one server."""
    (choices, _) = await asked(url, seed).read(http)
    assert (choices[0]["token_ids"], choices[0]["text"]) == said(server, seed)


async def test_the_rest_of_an_answer_takes_the_kv_of_its_prompt_from_the_other_server(
    decoding: TritonServer, neighbour: TritonServer, link: PeerLink, http: httpx.AsyncClient
) -> None:
    """Of prompts that it has never had.  It computes so fast that it does not wait for all of them.

    On a busy machine a prompt can be late, and then the whole request finds its KV, too.
    """
    more = ["--prefill-triton", neighbour.grpc_address, "--handover", "64"]
    with front([decoding], *more) as both:
        seeds = iter(range(1000, 1100))
        while hits(decoding) < 1024 or not outcomes(both, "handed_over"):
            await same(http, both, decoding, next(seeds))
        assert not outcomes(both, "mismatch")
    tokens = hits(decoding)
    assert count(decoding, "inflight_kv_tier_load_seconds_count") >= tokens // 256
    assert link.num_bytes >= tokens * 2048 - 2**20, "of keys and values of eight heads of 16 numbers, in two layers"


@nightly
async def test_answers_of_every_kind_equal_those_of_one_server(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    with fronts(decoding, prefill) as (alone, both):
        before = hits(decoding)
        for seed in range(10):
            await check_answers(http, both, alone, seed, seed % 3 == 2)
        # Of 80 and 10: on a busy machine a prompt can be late, and then some others are not handed over.
        assert outcomes(both, "handed_over") >= 40 and outcomes(both, "ended") >= 2
        assert not outcomes(both, "failed") and not count(decoding, "inflight_kv_tier_errors_total")
        assert hits(decoding) > before


@nightly
async def test_another_secret_and_another_checkpoint_are_a_miss(
    decoding: TritonServer, prefill: TritonServer, link: PeerLink, secrets: list[str], http: httpx.AsyncClient
) -> None:
    """Each of them changes on the server that computes the prompt, and then everything is as before.

    It comes before the tests that cancel many streams: Triton keeps an unloaded model, and its engine the port, for
    ever if a cancellation raced with the end of its stream (docs/operations/drain-and-reload.md).
    """
    more = ["--prefill-triton", prefill.grpc_address, "--handover", "64"]

    async def reload(**options: Any) -> float:
        write_entry(prefill.repositories[-1], MODEL, **giver(link, secrets, **options))
        load(prefill, MODEL)
        await until(lambda: len(stubs(prefill, MODEL)) == 1)  # the engine before it has the port
        return hits(decoding)

    with front([decoding], *more) as both:
        before = await reload(kv_store_secret_file=secrets[1])
        seed = 6000
        while "a reader has another kv_store_secret_file" not in prefill.log_text():
            await same(http, both, decoding, seed := seed + 1)
        assert outcomes(both, "handed_over") and hits(decoding) == before
        before = await reload(model=str(another_checkpoint(prefill.repositories[-1])))
        await send_until(http, both, "mismatch", 610_000)
        for seed in range(6100, 6103):
            await same(http, both, decoding, seed)
            assert said(prefill, seed) != said(decoding, seed), "it has other weights"
        while "has other KV, and is not read" not in decoding.log_text():
            seed += 1
            for server in (prefill, decoding):  # without a gateway, so that a rest asks for what the other one has
                with Client(server.grpc_address, model=MODEL) as client:
                    rest = {"input_ids": conversation(seed, LENGTH), "resume_token_ids": [7], "seed": 1}
                    found = client.generate(**rest, temperature=0.0, **SHORT)
                    alone = client.generate(**rest, temperature=0.0, cache_salt="alone", **SHORT)
                    assert found.token_ids == alone.token_ids
        assert hits(decoding) == before
        await reload()
        await send_until(http, both, "handed_over", 620_000)


@nightly
@pytest.mark.parametrize("num_bytes", [0, 100_000, 700_000], ids=["before the read", "in it", "behind an extent"])
@pytest.mark.parametrize("what", ["killed", "stopped", "damaged"])
async def test_a_read_that_breaks_changes_no_answer(
    what: str,
    num_bytes: int,
    decoding: TritonServer,
    prefill: TritonServer,
    link: PeerLink,
    http: httpx.AsyncClient,
) -> None:
    """The other engine is killed or stopped, or a bit is changed on the way: in the greeting, or in an extent."""
    first = {"killed": 2000, "stopped": 3000, "damaged": 4000}[what] + num_bytes // 1000
    with front([decoding], "--prefill-triton", prefill.grpc_address, "--handover", "64") as both:
        await until(lambda: responds(prefill))
        engine, errors = engine_process(prefill, MODEL), count(decoding, "inflight_kv_tier_errors_total")
        if what == "damaged":
            link.flip_after(num_bytes)
            struck = link.strike_after(num_bytes, lambda: None)
        else:
            struck = link.strike_after(num_bytes, engine.kill if what == "killed" else engine.suspend)
        seed = first
        try:
            while not struck.is_set():
                seed += 1
                await same(http, both, decoding, seed)
            await same(http, both, decoding, seed + 1)
        finally:
            if what == "stopped":
                engine.resume()
        await until(lambda: responds(prefill))
        if what == "damaged":
            await until(lambda: count(decoding, "inflight_kv_tier_errors_total") > errors)
        await send_until(http, both, "handed_over", 100 * first)
    await nothing_is_left(decoding, prefill)


@nightly
async def test_a_gateway_that_dies_between_the_two_leaves_nothing_behind(
    decoding: TritonServer, prefill: TritonServer, link: PeerLink, http: httpx.AsyncClient
) -> None:
    """When its client has the first token: before the other engine asks for KV, and while it reads it."""
    address = prefill.grpc_address
    for seed, is_read in ((5000, False), (5200, True)):
        process = gateway([decoding.grpc_address], "--prefill-triton", address, "--handover", "64").start()
        engine, held = engine_process(decoding, MODEL), threading.Event()
        with contextlib.ExitStack() as ends:
            ends.callback(link.go_on)
            ends.callback(process.stop, signal.SIGKILL)
            ends.callback(engine.resume)
            if is_read:
                held = link.strike_after(300_000, link.hold)
            else:
                engine.suspend()
            while True:
                answer = asked(process.url, seed := seed + 1, max_tokens=100)
                reading = asyncio.create_task(answer.read(http))
                await until(lambda: held.is_set() or answer.ended_well if is_read else answer.begun.is_set())  # noqa: B023
                if held.is_set() or not is_read:
                    break
                await reading
            process.stop(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                await reading
            engine.resume()
            await nothing_is_left(prefill, decoding)  # while the read hangs, too


@nightly
async def test_an_engine_that_dies_within_an_answer_asks_the_other_again(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    with front([decoding], "--prefill-triton", prefill.grpc_address, "--handover", "64") as both:
        await send_until(http, both, "handed_over", 700_000)
        seed, taken = 7000, 0.0
        while seed < 7003 or not taken:
            seed += 1
            answer = asked(both, seed, **LONG)
            engine = engine_process(decoding, MODEL)
            with slowed(engine):
                reading = asyncio.create_task(answer.read(http))
                await until(lambda: len(answer.events) >= BEGUN or answer.ended_well)  # noqa: B023
                before = hits(decoding)
                engine.kill()
            (choices, _) = await reading
            taken += hits(decoding) - before
            assert (choices[0]["token_ids"], choices[0]["text"]) == said(decoding, seed, **LONG)
    await nothing_is_left(prefill, decoding)


@nightly
async def test_a_server_that_dies_within_an_answer_has_another_continue_it_or_the_stream_says_so(
    decoding: TritonServer,
    prefill: TritonServer,
    start: Callable[..., TritonServer],
    link: PeerLink,
    secrets: list[str],
    http: httpx.AsyncClient,
) -> None:
    doomed = start(**taker(link, secrets))
    more = ["--prefill-triton", prefill.grpc_address, "--handover", "64", "--reconnect-timeout", "1"]
    with front([doomed, decoding], *more) as two, front([doomed], *more) as one:
        for url in (one, two):
            await send_until(http, url, "handed_over", 800_000)
        engine = engine_process(doomed, MODEL)
        for number in tries():
            seed = 8000 + number
            answers = [asked(url, seed, **LONG) for url in (one, two)]
            with slowed(engine):
                reading = [asyncio.create_task(answer.read(http)) for answer in answers]
                await until(lambda: all(len(answer.events) >= BEGUN or answer.ended_well for answer in answers))  # noqa: B023
            engine.suspend()
            if (await asyncio.to_thread(open_requests, doomed)) == len(answers):
                break
            engine.resume()
            await asyncio.gather(*reading)
        else:
            pytest.fail("an answer had ended in every try")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            send_all(doomed, number)
        (choices, _) = await reading[1]
        assert (choices[0]["token_ids"], choices[0]["text"]) == said(decoding, seed, **LONG)
        with pytest.raises(AssertionError):
            await reading[0]
        unreachable = "upstream_unreachable", f"cannot reach {doomed.grpc_address} by gRPC: "
        assert_error(answers[0].events[-1], *unreachable)
        assert metric(two, "inflight_gateway_resumed_streams_total") == 1
        assert metric(one, "inflight_gateway_broken_streams_total") == 1
        response = await http.post(f"{one}/v1/completions", json=asked(one, 8100).body)
        assert response.status_code == 503, response.text
        assert_error(response.json(), *unreachable)
    await nothing_is_left(prefill, decoding)


@nightly
async def test_the_server_that_computes_prompts_dies(
    decoding: TritonServer, prefill: TritonServer, http: httpx.AsyncClient
) -> None:
    with fronts(decoding, prefill) as (alone, both):
        await send_until(http, both, "handed_over", 900_000)
        await check_answers(http, both, alone, 90, strike=prefill.kill)
        await check_answers(http, both, alone, 91)
        for outcome, seed in (("failed", 910_000), ("busy", 920_000)):  # it rests after each failure
            await send_until(http, both, outcome, seed)
    await nothing_is_left(decoding)


def another_checkpoint(folder: Path) -> Path:
    """With other weights: all norms are twice as large."""
    made = folder / "another"
    if not made.exists():
        shutil.copytree(CHECKPOINT, made)
        weights = load_file(made / "model.safetensors")
        weights = {name: tensor * 2 if "norm" in name else tensor for name, tensor in weights.items()}
        save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def assert_error(body: dict[str, Any], code: str, beginning: str) -> None:
    assert body["error"]["code"] == code and body["error"]["message"].startswith(beginning), body


async def nothing_is_left(*servers: TritonServer) -> None:
    """All blocks are free or cached, the reserved ones of loads, too."""
    for server in servers:
        with Client(server.grpc_address, model=MODEL) as client:
            await until(lambda: not json.loads(client.control("stats"))["frontend"]["open_requests"])
            total = json.loads(client.control("stats"))["num_blocks"]
        names = ("inflight_kv_blocks_used", "inflight_kv_blocks_free")
        await until(lambda: [count(server, name) for name in names] == [0, total])  # noqa: B023
