"""Retry policy, and what a stream does with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_client import (
    AsyncStream,
    InvalidRequestError,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    Stream,
    UnavailableError,
)
from inflight_client.endpoints import Endpoints
from inflight_client.request import GenerationRequest

FAST = RetryPolicy(max_attempts=3, initial_delay=0.001, max_delay=0.002)
BUSY = UnavailableError("the queue is full")
TEXT = {"text_output": ["a"], "token_ids": [1], "finish_reason": ["None"]}
LAST = {"text_output": [" b"], "token_ids": [2], "finish_reason": ["stop"]}

policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 50),
    initial_delay=st.floats(0, 100),
    max_delay=st.floats(0, 100),
    multiplier=st.floats(1, 1e6),
    jitter=st.floats(0, 1),
    total_timeout=st.none() | st.floats(0, 1000),
)


@given(policies, st.integers(1, 100), st.floats(0, 2000))
def test_delay_stays_within_its_bounds(policy: RetryPolicy, failures: int, elapsed: float) -> None:
    delay = policy.delay(failures, elapsed)
    if failures >= policy.max_attempts:
        assert delay is None
    if delay is not None:
        longest = min(policy.max_delay, policy.initial_delay * policy.multiplier ** min(failures - 1, 50))
        assert (1 - policy.jitter) * longest * 0.999 <= delay <= longest
        assert policy.total_timeout is None or elapsed + delay <= policy.total_timeout


@given(policies)
def test_never_more_attempts_than_allowed(policy: RetryPolicy) -> None:
    tries = 1
    while policy.delay(tries, 0.0) is not None:
        tries += 1
    assert tries <= policy.max_attempts


def test_delays_grow_to_the_maximum() -> None:
    policy = RetryPolicy(max_attempts=9, initial_delay=0.1, multiplier=2, max_delay=1, jitter=0)
    assert [policy.delay(k, 0) for k in range(1, 6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])


def test_an_invalid_policy_is_rejected_by_name() -> None:
    for wrong in [
        {"max_attempts": 0},
        {"jitter": 1.5},
        {"multiplier": 0.5},
        {"initial_delay": -1},
        {"total_timeout": -1},
    ]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RetryPolicy(**wrong)


class Server:
    """Replaces the servers of a client: each attempt plays the next script of outputs and errors.

    Attributes:
        opened: the server of each attempt.
        requests: what was sent.
    """

    def __init__(self, *tries: list[Any], count: int = 1) -> None:
        self.tries = list(tries)
        self.endpoints = Endpoints(count)
        self.opened: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.timeouts: list[float | None] = []

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> Any:
        self.opened.append(index)
        self.requests.append(request)
        self.timeouts.append(timeout)
        return Call(iter(self.tries.pop(0)))

    def address(self, index: int) -> str:
        return f"server-{index}"

    def is_ready(self, index: int, model: str) -> bool:
        return False

    def watch(self, stream: Stream) -> None:
        pass


class Call:
    def __init__(self, script: Iterator[Any]) -> None:
        self.script = script
        self.cancelled = threading.Event()

    def __next__(self) -> Any:
        item = next(self.script)
        if isinstance(item, Exception):
            raise item
        return item

    async def __anext__(self) -> Any:
        try:
            return self.__next__()
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancelled.set()


def request(**options: Any) -> GenerationRequest:
    return GenerationRequest(model="m", prompt="p", request_id="r1", **options)


def test_unavailable_is_retried_until_it_works() -> None:
    server = Server([BUSY], [BUSY], [TEXT, LAST])
    stream = Stream(request(), FAST, server)
    assert [chunk.text for chunk in stream] == ["a", " b"]
    assert stream.result().attempts == 3
    assert stream.result().text == "a b"


async def test_asyncio_unavailable_is_retried_until_it_works() -> None:
    server = Server([BUSY], [TEXT, LAST])
    stream = AsyncStream(request(), FAST, server)
    assert [chunk.text async for chunk in stream] == ["a", " b"]
    assert stream.result().attempts == 2


def test_the_last_error_is_raised_when_attempts_run_out() -> None:
    server = Server(*[[BUSY] for _ in range(5)])
    with pytest.raises(UnavailableError, match="queue is full") as caught:
        list(Stream(request(), FAST, server))
    assert len(server.timeouts) == 3
    assert caught.value.request_id == "r1"
    assert caught.value.partial is None


@pytest.mark.parametrize("error", [InvalidRequestError("top_p"), ServerError("x"), RequestCancelledError("y")])
def test_other_errors_are_not_retried(error: Exception) -> None:
    server = Server([error], [TEXT])
    with pytest.raises(type(error)):
        list(Stream(request(), FAST, server))
    assert len(server.timeouts) == 1


def test_an_outage_is_waited_out_by_time_and_not_by_attempts() -> None:
    policy = RetryPolicy(max_attempts=1, initial_delay=0.1, multiplier=1, jitter=0, outage_timeout=60)
    assert policy.delay(500, 1000.0, outage=59.9) == 0.1 and policy.delay(1, 0.0, outage=59.95) is None
    with pytest.raises(ValueError, match="outage_timeout=-1: must be at least 0"):
        RetryPolicy(outage_timeout=-1)
    server = Server(*[[BUSY] for _ in range(30)], [TEXT, LAST])
    patient = RetryPolicy(max_attempts=1, initial_delay=0.0, outage_timeout=60)
    stream = Stream(request(), patient, server)
    assert [chunk.text for chunk in stream] == ["a", " b"] and stream.result().attempts == 31


def test_an_outage_begins_with_the_first_failure_after_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(Stream, "_elapsed", lambda self: now)

    def after(seconds: float, *items: Any) -> Iterator[Any]:
        nonlocal now
        now += seconds
        yield from items

    patient = RetryPolicy(initial_delay=0.0, resume=True, outage_timeout=5)
    tries = [after(4, BUSY), after(4, TEXT, BUSY), after(4, BUSY), after(0, LAST)]
    stream = Stream(request(), patient, Server(*tries))  # type: ignore[arg-type]
    assert [chunk.text for chunk in stream] == ["a", " b"] and now == 12
    stream = Stream(request(), patient, Server(after(1, BUSY), after(6, BUSY), [TEXT]))  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        next(stream)


def test_nothing_is_retried_once_output_has_arrived() -> None:
    server = Server([TEXT, BUSY], [TEXT, LAST])
    stream = Stream(request(), FAST, server)
    assert next(stream).text == "a"
    with pytest.raises(UnavailableError) as caught:
        next(stream)
    assert len(server.timeouts) == 1
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == [1]
    with pytest.raises(StopIteration):
        next(stream)


def test_attempts_share_the_timeout_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(Stream, "_elapsed", lambda self: now)

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            now += timeout or 0.0
            return False

    server = Server(*[[BUSY] for _ in range(50)])
    policy = RetryPolicy(max_attempts=50, initial_delay=0.25, multiplier=1, jitter=0)
    stream = Stream(request(timeout=1.0), policy, server)
    stream._wake = Wake()
    with pytest.raises(UnavailableError):
        list(stream)
    assert server.timeouts == [1.0, 0.75, 0.5, 0.25]


def test_cancelling_ends_a_wait_for_the_next_attempt() -> None:
    waits = threading.Event()

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    server = Server([BUSY], [TEXT])
    stream = Stream(request(), RetryPolicy(initial_delay=60, max_delay=60), server)
    stream._wake = Wake()
    threading.Thread(target=lambda: waits.wait() and stream.cancel(), daemon=True).start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    assert len(server.timeouts) == 1


def test_a_closed_stream_yields_nothing_more() -> None:
    server = Server([TEXT, LAST])
    with Stream(request(), FAST, server) as stream:
        next(stream)
        call = stream._call
    assert call.cancelled.is_set()
    assert list(stream) == []


def test_an_interrupt_cancels_the_request() -> None:
    class Interrupted(Call):
        def __next__(self) -> Any:
            raise KeyboardInterrupt

    call = Interrupted(iter(()))
    with pytest.raises(KeyboardInterrupt):
        server = Server()
        server.open = lambda *_: call  # type: ignore[method-assign]
        next(Stream(request(), FAST, server))
    assert call.cancelled.is_set()


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 40))
def test_output_has_attempts_of_its_own(first: int, resumed: int, failures: int) -> None:
    policy = RetryPolicy(max_attempts=first, resume_attempts=resumed)
    assert (policy.delay(failures, 0.0) is None) == (failures >= first)
    assert (policy.delay(failures, 0.0, received=True) is None) == (failures >= resumed)
