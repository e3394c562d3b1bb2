"""The asyncio client against a real tritonserver, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from inflight_client import (
    AsyncClient,
    DeadlineExceededError,
    InflightError,
    InvalidRequestError,
    RequestCancelledError,
    RetryPolicy,
    ServerUnreachableError,
    UnavailableError,
    transport_grpc,
    transport_http,
)
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

Look = Callable[..., dict[str, Any]]
QUEUE_FULL = {"code": "UNAVAILABLE", "error": "the queue is full: try again later"}


def script(key: str, **values: Any) -> str:
    return json.dumps({"key": key, **values})


@pytest.fixture
async def aclient(address: str, protocol: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, protocol=protocol, model="scripted") as client:
        yield client


async def test_a_stream_yields_what_the_model_sends(aclient: AsyncClient) -> None:
    stream = aclient.stream("It streams")
    assert [(chunk.text, chunk.token_ids) async for chunk in stream] == [("It", [0]), (" streams", [1])]
    result = stream.result()
    assert (result.text, result.finish_reason, result.usage.input_tokens) == ("It streams", "stop", 7)


async def test_generate_returns_the_complete_answer(aclient: AsyncClient) -> None:
    result = await aclient.generate(messages=[{"role": "user", "content": "漢 字"}], n=2, max_tokens=1)
    assert [choice.text for choice in result.choices] == ["user:漢"] * 2
    assert [choice.token_ids for choice in result.choices] == [[0], [1000]]
    assert result.finish_reason == "length"


async def test_eight_tasks_share_a_client(aclient: AsyncClient) -> None:
    begun, all_begun = [], asyncio.Event()

    async def run(number: int) -> list[int]:
        stream = aclient.stream(json.dumps({"tokens": 20, "delay": 0.005}), max_tokens=20)
        first = await anext(stream)
        begun.append(number)
        if len(begun) == 8:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), 30)  # all eight are open
        return [*first.token_ids, *[token_id async for chunk in stream for token_id in chunk.token_ids]]

    assert await asyncio.gather(*(run(number) for number in range(8))) == [list(range(20))] * 8


@pytest.mark.parametrize("how", ["cancel", "close", "drop", "task"])
async def test_cancelling_ends_only_this_request(aclient: AsyncClient, seen: Look, key: str, how: str) -> None:
    other = aclient.stream(script(f"{key} other", tokens=20, delay=0.01), max_tokens=20)
    stream = aclient.stream(script(key, tokens=1000, delay=0.02), max_tokens=1000)
    assert (await anext(other)).text == (await anext(stream)).text == "t0"
    if how == "cancel":
        stream.cancel()
        with pytest.raises(RequestCancelledError) as caught:
            await _drain(stream)  # responses may have come before
        assert caught.value.partial is not None
    elif how == "close":
        await stream.close()
        assert [chunk async for chunk in stream] == []
    elif how == "drop":
        del stream
    else:
        task = asyncio.create_task(_drain(stream))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [chunk async for chunk in stream] == []
    report = await asyncio.to_thread(seen, key, lambda report: report["cancelled"] == 1)
    assert report["finished"] == 0
    assert len([chunk async for chunk in other]) == 19
    assert (await asyncio.to_thread(seen, f"{key} other"))["cancelled"] == 0


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_another_task_can_cancel_before_the_first_token(
    aclient: AsyncClient, seen: Look, key: str, release: Callable[[str], None]
) -> None:
    stream = aclient.stream(script(key, tokens=500, delay=0.02, held=True), max_tokens=500)

    async def cancel() -> None:
        try:
            await asyncio.to_thread(seen, key, lambda report: report.get("running") == 1)
        finally:
            stream.cancel()

    other = asyncio.create_task(cancel())
    try:
        with pytest.raises(RequestCancelledError):
            await anext(stream)
    finally:
        await asyncio.to_thread(release, key)
    await other
    await asyncio.to_thread(seen, key, lambda report: report["cancelled"] == 1)


async def test_a_wait_for_that_times_out_cancels_the_request(aclient: AsyncClient, seen: Look, key: str) -> None:
    answer = asyncio.create_task(aclient.generate(script(key, tokens=1000, delay=0.02), max_tokens=1000))
    await asyncio.to_thread(seen, key, lambda report: report.get("running") == 1)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(answer, 0.2)
    await asyncio.to_thread(seen, key, lambda report: report["cancelled"] == 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"one_response": True}, {"n": 3}, {"n": 3, "one_response": True}, {"return_token_ids": False}],
)
@pytest.mark.parametrize("received", [False, True])
async def test_a_task_that_is_cancelled_cancels_its_request(
    scripted: TritonServer, seen: Look, key: str, options: dict[str, Any], received: bool
) -> None:
    """At any point of its request.  Over HTTP, Triton notices no client that hangs up before the next response."""
    text = script(key, tokens=1000, delay=0.02)
    arrived = asyncio.Event()

    async def read(client: AsyncClient) -> None:
        async with client.stream(text, **options, max_tokens=1000) as stream:
            async for _ in stream:
                arrived.set()

    async with AsyncClient(scripted.grpc_address, model="scripted") as client:
        task = asyncio.create_task(read(client))
        if received and not options.get("one_response"):
            await arrived.wait()
        await asyncio.to_thread(seen, key, lambda report: report.get("running") == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        report = await asyncio.to_thread(seen, key, lambda report: report["cancelled"] == 1)
        assert report["finished"] == 0
        assert (await client.generate("still serves")).text == "still serves"


async def test_a_task_that_is_cancelled_between_two_responses_cancels_its_request(
    scripted: TritonServer, seen: Look, key: str
) -> None:
    """As in a gateway, which waits until its own client has read the last chunk."""
    waits = asyncio.Event()

    async def read(client: AsyncClient) -> None:
        async with client.stream(script(key, tokens=1000, delay=0.02), max_tokens=1000) as stream:
            async for _ in stream:
                waits.set()
                await asyncio.Event().wait()

    async with AsyncClient(scripted.grpc_address, model="scripted") as client:
        task = asyncio.create_task(read(client))
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.to_thread(seen, key, lambda report: report["cancelled"] == 1))["finished"] == 0


async def test_unavailable_then_success(aclient: AsyncClient, key: str) -> None:
    result = await aclient.generate(script(key, words=["done"], fail_times=2, **QUEUE_FULL))
    assert (result.text, result.attempts) == ("done", 3)


async def test_retries_end(address: str, protocol: Any, seen: Look, key: str) -> None:
    policy = RetryPolicy(max_attempts=2, initial_delay=0.01)
    async with AsyncClient(address, protocol=protocol, model="scripted", retries=policy) as client:
        with pytest.raises(UnavailableError, match="queue is full"):
            await client.generate(script(key, fail_times=99, **QUEUE_FULL))
    assert (await asyncio.to_thread(seen, key))["requests"] == 2


async def test_an_invalid_value_is_rejected_with_the_servers_message(aclient: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="temperature=-1 is out of range"):
        await aclient.generate("a", temperature=-1)


async def test_the_server_enforces_the_deadline(aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in (transport_grpc, transport_http):
        monkeypatch.setattr(transport, "_GRACE_SECONDS", 60.0)
    for timeout in (0.3, 3.0, 20.0):  # on a busy machine the first token can come after the deadline
        with pytest.raises(DeadlineExceededError, match="timeout of") as caught:
            await aclient.generate(json.dumps({"tokens": 1000, "delay": 0.05}), max_tokens=1000, timeout=timeout)
        if caught.value.partial is not None and caught.value.partial.token_ids:
            break
    else:
        pytest.fail("no token before the deadline")


async def test_the_client_enforces_a_deadline_that_the_server_ignores(
    aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for transport in (transport_grpc, transport_http):
        monkeypatch.setattr(transport, "_GRACE_SECONDS", 0.1)
    with pytest.raises(DeadlineExceededError, match="did not end the request in time"):
        text = json.dumps({"tokens": 500, "delay": 0.05, "no_deadline": True})
        await aclient.generate(text, max_tokens=500, timeout=0.2)


async def test_health_and_metadata(aclient: AsyncClient) -> None:
    assert await aclient.health()
    assert await aclient.ready()
    assert not await aclient.ready("missing")
    await aclient.wait_until_ready(timeout=60)
    assert (await aclient.metadata())["name"] == "scripted"
    assert (await aclient.server_metadata())["name"] == "triton"
    assert "scripted" in [entry["name"] for entry in await aclient.repository_index()]
    with pytest.raises(DeadlineExceededError, match="'missing' is not ready"):
        await aclient.wait_until_ready(timeout=0.2, model="missing")


async def test_a_control_request_is_answered_with_text(aclient: AsyncClient) -> None:
    assert await aclient.control("step_trace") == "answer to step_trace"
    with pytest.raises(InvalidRequestError, match="not supported"):
        await aclient.control("refused")


async def test_no_server_at_the_address(protocol: Any) -> None:
    address = f"127.0.0.1:{pick_ports(1)[0]}"
    policy = RetryPolicy(max_attempts=2, initial_delay=0.01)
    async with AsyncClient(address, protocol=protocol, retries=policy) as client:
        with pytest.raises(ServerUnreachableError, match=f"cannot reach {address}"):
            await client.generate("a")
        assert not await client.health()
        with pytest.raises(DeadlineExceededError, match=f"cannot reach {address}"):
            await client.wait_until_ready(timeout=0.2)


def test_a_client_may_be_created_before_its_loop_runs(address: str, protocol: Any) -> None:
    client = AsyncClient(address, protocol=protocol, model="scripted")

    async def main() -> str:
        async with client:
            return (await client.generate("made early")).text

    assert asyncio.run(main()) == "made early"


async def test_closing_the_client_ends_its_streams_with_its_own_error(address: str, protocol: Any) -> None:
    """Not with a `CancelledError`, which would end the reading task silently."""
    async with AsyncClient(address, protocol=protocol, model="scripted") as client:
        stream = client.stream(json.dumps({"tokens": 1000, "delay": 0.02}), max_tokens=1000)
        await stream.__anext__()
    with pytest.raises(InflightError):
        async for _ in stream:
            pass
