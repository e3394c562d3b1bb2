"""Streams that begin on one tritonserver and end on another have the output of undisturbed ones."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from processes_of import engine_process, run_in_turns, tries
from replicas import Fleet
from wire import post, server_sent_events

from inflight_client import AsyncClient, Client, GenerationResult, RequestCancelledError, RetryPolicy
from inflight_tools.launcher import TritonServer

LENGTH = 240
BASE = {"max_tokens": LENGTH, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Return a list of", "temperature": 0, **BASE},
    {"prompt": "def main", "temperature": 1.0, "seed": 7, "n": 3, "logprobs": 1, **BASE},
    {"prompt": "The naïve 你好", "temperature": 1.4, "seed": 8, "return_cumulative_logprob": True, **BASE},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.2, "seed": 9, "n": 2, **BASE}
    | {"max_tokens": 2 * LENGTH, "frequency_penalty": 0.3, "stop": ["zzzz", "\ufffd\ufffd\ufffd\ufffd"]},
]
POLICY = RetryPolicy(stall_timeout=2.0)


@pytest.fixture(scope="module")
def doomed(fleet: Fleet) -> TritonServer:
    """Another server with the same model, to be killed."""
    return fleet.servers[1]


@pytest.fixture(scope="module")
def expected(server: TritonServer) -> list[GenerationResult]:
    with Client(server.grpc_address) as client:
        return [client.generate(**request) for request in REQUESTS]


class Begun:
    """Counts the streams that have output, so that the engine can be stopped once all have, and before any ends."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self.all = threading.Event()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self.all.set()


def run_blocking(client: Client, request: dict[str, Any], begun: Begun) -> GenerationResult:
    stream = client.stream(**request)
    next(stream)
    begun.one()
    for _ in stream:
        pass
    return stream.result()


async def run_async(client: AsyncClient, request: dict[str, Any], begun: Begun) -> GenerationResult:
    stream = client.stream(**request)
    await anext(stream)
    begun.one()
    async for _ in stream:
        pass
    return stream.result()


def wait_for_open_requests(server: TritonServer, count: int) -> None:
    """Returns when the frontend has so many, also while its engine is stopped."""
    with Client(server.grpc_address) as client:
        while json.loads(client.control("stats"))["frontend"]["open_requests"] < count:
            time.sleep(0.02)


def all_kinds(doomed: TritonServer, server: TritonServer, strike: Callable[[], None]) -> list[GenerationResult]:
    """Every request over both protocols with both clients, all at once.

    Once all have begun, and mostly before any is near its end, the first server's engine is stopped and `strike`
    called.
    """
    pairs = {
        "grpc": f"{doomed.grpc_address},{server.grpc_address}",
        "http": f"{doomed.http_address},{server.http_address}",
    }
    begun = Begun(4 * len(REQUESTS))
    engine = engine_process(doomed)
    engine.suspend()

    async def use_async_clients() -> list[GenerationResult]:
        async with (
            AsyncClient(pairs["grpc"], retries=POLICY) as grpc,
            AsyncClient(pairs["http"], protocol="http", retries=POLICY) as http,
        ):
            return await asyncio.gather(*(run_async(c, r, begun) for c in (grpc, http) for r in REQUESTS))

    with (
        ThreadPoolExecutor(20) as pool,
        Client(pairs["grpc"], retries=POLICY) as grpc,
        Client(pairs["http"], protocol="http", retries=POLICY) as http,
    ):
        blocking: list[Future[GenerationResult]] = [
            pool.submit(run_blocking, client, request, begun) for client in (grpc, http) for request in REQUESTS
        ]
        others = pool.submit(asyncio.run, use_async_clients())
        wait_for_open_requests(doomed, 4 * len(REQUESTS))
        run_in_turns(engine, begun.all.wait)
        strike()
        return [*(one.result(60) for one in blocking), *others.result(60)]


def are_interrupted(results: list[GenerationResult], expected: list[GenerationResult]) -> bool:
    """Returns whether all were; each must have the expected output."""
    for number, result in enumerate(results):
        other = expected[number % len(expected)]
        assert (result.choices, result.usage) == (other.choices, other.usage), f"stream {number}"
    return all(result.attempts >= 2 for result in results)


def test_streams_of_a_server_that_hangs_are_continued_on_the_next(
    server: TritonServer, doomed: TritonServer, expected: list[GenerationResult]
) -> None:
    engine = engine_process(doomed)

    def all_are_continued() -> bool:
        try:
            return are_interrupted(all_kinds(doomed, server, lambda: None), expected)
        finally:
            engine.resume()

    assert any(all_are_continued() for _ in tries())


def test_a_stream_can_be_cancelled_while_it_looks_for_another_server(doomed: TritonServer) -> None:
    """No server listens at the other address, and the pause before the next attempt is long."""
    policy = RetryPolicy(initial_delay=60.0, max_delay=60.0, stall_timeout=0.2)
    engine = engine_process(doomed)

    def is_cancelled() -> bool:
        engine.suspend()
        begun = Begun(1)
        with Client(f"{doomed.grpc_address},127.0.0.1:9", retries=policy) as client, ThreadPoolExecutor(1) as pool:
            stream = client.stream(**REQUESTS[0])
            wait_for_open_requests(doomed, 1)
            try:
                first = pool.submit(lambda: (next(stream), begun.one()))
                run_in_turns(engine, begun.all.wait)
                first.result(20)
                threading.Timer(0.6, stream.cancel).start()
                list(stream)
                assert len(stream.result().choices[0].token_ids) == LENGTH
            except RequestCancelledError as error:
                assert error.partial is not None and error.partial.token_ids
                return True
            finally:
                engine.resume()
        return False  # it ended before its engine was stopped

    assert any(is_cancelled() for _ in tries())


def test_a_client_of_its_own_resumes_over_http(server: TritonServer, expected: list[GenerationResult]) -> None:
    """In a `generate_stream` body, which gives inputs as lists."""
    whole = expected[1]
    cuts = (100, LENGTH, 0)
    body = {
        "text_input": REQUESTS[1]["prompt"],
        "stream": True,
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "seed": 7,
        "n": 3,
        "ignore_eos": True,
        "return_token_ids": True,
        "resume_token_ids": [t for choice, cut in zip(whole.choices, cuts) for t in choice.token_ids[:cut]],
        "resume_token_counts": cuts,
    }
    status, answer = post(f"http://{server.http_address}/v2/models/demo/generate_stream", body)
    assert status == 200, answer
    texts, ids = [""] * 3, [[], [], []]  # type: list[str], list[list[int]]
    for event in server_sent_events(answer):
        start = 0
        for index, count in enumerate(event["token_counts"]):
            tokens = event["token_ids"] if isinstance(event["token_ids"], list) else [event["token_ids"]]
            ids[index] += tokens[start : start + count]
            texts[index] += event["text_output"][index]
            start += count
    assert ids == [choice.token_ids[cut:] for choice, cut in zip(whole.choices, cuts)]
    assert (texts[1], texts[2]) == ("", whole.choices[2].text)
    assert whole.choices[0].text.endswith(texts[0]) and texts[0]


def test_an_output_without_its_seed_is_refused_and_a_complete_one_ends_at_once(
    server: TritonServer, expected: list[GenerationResult]
) -> None:
    url = f"http://{server.http_address}/v2/models/demo/generate"
    body = {"text_input": "a", "max_tokens": 4, "resume_token_ids": [5, 6, 7]}
    status, answer = post(url, body)
    assert status == 400 and "needs the seed of the request that began the output" in answer
    status, answer = post(url, {**body, "resume_token_ids": [5, 6, 7, 8], "seed": 1, "return_finish_reason": True})
    assert status == 200
    assert (json.loads(answer)["text_output"], json.loads(answer)["finish_reason"]) == ("", "length")


@pytest.mark.nightly  # test_fleet.py kills a server whose clients are gateways, which have the same client
def test_streams_of_a_killed_server_are_continued_on_the_next(
    server: TritonServer, fleet: Fleet, doomed: TritonServer, expected: list[GenerationResult]
) -> None:
    """SIGKILL of the whole server, as if its machine lost power."""

    def all_are_continued() -> bool:
        try:
            return are_interrupted(all_kinds(doomed, server, lambda: fleet.kill(1)), expected)
        finally:
            fleet.revive(1)

    assert any(all_are_continued() for _ in tries())
