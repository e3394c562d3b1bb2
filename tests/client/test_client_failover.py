"""Several servers: which one is next, and what is sent to it of an interrupted stream."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_client import (
    AsyncClient,
    AsyncStream,
    Client,
    DeadlineExceededError,
    GenerationResult,
    InvalidRequestError,
    RequestCancelledError,
    RetryPolicy,
    ServerUnreachableError,
    Stream,
    UnavailableError,
)
from inflight_client.connection import Connection
from inflight_client.endpoint import find_endpoints
from inflight_client.endpoints import Endpoints, split_urls
from inflight_client.request import GenerationRequest
from inflight_client.servers import AsyncServers, BlockingServers
from inflight_client.wire import Columns
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

FAST = RetryPolicy(max_attempts=12, initial_delay=0.0, stall_timeout=0.05)
LOST = ServerUnreachableError("lost the connection to a")
EXPLICIT = {"prompt": "p", "request_id": "r1", "model": "m"}


class Cluster:
    """Servers that answer every request with the same output, token by token, and break off where told to.

    Args:
        output: the tokens of each sequence.
        breaks: of each attempt the responses before it fails, and how; None: the attempt answers nothing more.
    """

    def __init__(self, output: list[list[int]], breaks: list[tuple[int, Any]], count: int = 2) -> None:
        self.output, self.breaks = output, list(breaks)
        self.endpoints = Endpoints(count)
        self.opened: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.timeouts: list[float | None] = []
        self.watched: list[Stream] = []
        self.is_well = True
        self.speaks_ids = True

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> Call:
        self.opened.append(index)
        self.requests.append(request)
        self.timeouts.append(timeout)
        return Call(self._responses(request, *(self.breaks.pop(0) if self.breaks else (-1, None))))

    def _responses(self, request: GenerationRequest, limit: int, ending: Any) -> Iterator[Any]:
        given = request.resume_token_ids or [[] for _ in self.output]
        places = [len(all_) if some is None else len(some) for some, all_ in zip(given, self.output)]
        for some, all_ in zip(given, self.output):
            assert some is None or all_[: len(some)] == some
        sent = 0
        while sent != limit and (sent == 0 or any(p < len(o) for p, o in zip(places, self.output))):
            yield self._response(request, places)
            sent += 1
        if sent == limit:
            yield ending

    def _response(self, request: GenerationRequest, places: list[int]) -> Columns:
        new = [all_[place : place + 1] for all_, place in zip(self.output, places)]
        columns: Columns = {"text_output": [f"<{ids[0]}>" if ids else "" for ids in new], "num_input_tokens": [3]}
        if self.speaks_ids and request.return_token_ids:
            columns["token_ids"] = [token for ids in new for token in ids]
            columns["token_counts"] = [len(ids) for ids in new]
        if request.return_log_probs:
            width = max(map(len, new))
            columns["output_log_probs"] = [-1.0 / (ids[0] + 1) if ids else 0.0 for ids in new for _ in range(width)]
        # Added one by one, as by the server: since Python 3.12 `sum` rounds once, at the end.
        begun = request.resume_cumulative_logprob or [0.0] * len(new)
        given = request.resume_token_ids or [[] for _ in new]
        for index, ids in enumerate(new):
            places[index] += len(ids)
        if request.return_cumulative_logprob:
            columns["cumulative_logprob"] = [
                functools.reduce(operator.add, (-1.0 / (token + 1) for token in all_[len(some or []) : place]), start)
                if some is not None
                else start
                for start, some, all_, place in zip(begun, given, self.output, places)
            ]
        ends = [place == len(all_) for place, all_ in zip(places, self.output)]
        columns["finish_reason"] = ["length" if end else "None" for end in ends]
        return columns

    def address(self, index: int) -> str:
        return f"server-{index}"

    def responds(self, index: int, model: str) -> bool:
        return self.is_well

    def watch(self, stream: Stream) -> None:
        self.watched.append(stream)


class AsyncCluster(Cluster):
    async def responds(self, index: int, model: str) -> bool:  # type: ignore[override]
        return self.is_well


class Call:
    """An item that is an exception is raised; `threading.Event` is silence until the call is cancelled."""

    def __init__(self, script: Iterator[Any]) -> None:
        self.script = script
        self.cancelled = threading.Event()

    def __next__(self) -> Any:
        item = next(self.script)
        if item is threading.Event:
            assert self.cancelled.wait(20)
            raise RequestCancelledError("the request was cancelled by this client")
        if isinstance(item, Exception):
            raise item
        return item

    async def __anext__(self) -> Any:
        try:
            return await asyncio.to_thread(self._next)
        except _End:
            raise StopAsyncIteration from None

    def _next(self) -> Any:
        try:
            return self.__next__()
        except StopIteration:
            raise _End from None

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancelled.set()


class _End(Exception):
    pass


def request(**options: Any) -> GenerationRequest:
    return GenerationRequest.build("p", None, None, options, model="m", timeout=None)  # type: ignore[arg-type]


def answer(cluster: Cluster, policy: RetryPolicy = FAST, **options: Any) -> GenerationResult:
    stream = Stream(request(**options), policy, cluster)
    chunks = list(stream)
    result = stream.result()
    for index, choice in enumerate(result.choices):
        assert "".join(chunk.choices[index].text for chunk in chunks) == choice.text
    return result


def same(result: GenerationResult, other: GenerationResult) -> bool:
    return (result.choices, result.usage) == (other.choices, other.usage)


ENDINGS = [LOST, UnavailableError("the model is draining; retry in 0.0 s"), None]
outputs = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8), min_size=1, max_size=3)
breaks = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([LOST, UnavailableError("busy")])), max_size=6)


@given(output=outputs, breaks=breaks, shows_ids=st.booleans(), sums=st.booleans())
def test_an_answer_that_was_interrupted_anywhere_equals_one_that_was_not(
    output: list[list[int]], breaks: list[tuple[int, Any]], shows_ids: bool, sums: bool
) -> None:
    options = {"n": len(output), "return_token_ids": shows_ids, "return_cumulative_logprob": sums}
    whole = answer(Cluster(output, []), **options)
    cluster = Cluster(output, breaks)
    result = answer(cluster, **options)
    assert same(result, whole)
    assert result.attempts == len(cluster.opened)
    assert whole.token_ids == (output[0] if shows_ids else [])
    assert whole.usage.output_tokens == sum(map(len, output))


@given(output=outputs, breaks=breaks)
async def test_also_with_asyncio(output: list[list[int]], breaks: list[tuple[int, Any]]) -> None:
    whole = answer(Cluster(output, []), n=len(output))
    stream = AsyncStream(request(n=len(output)), FAST, AsyncCluster(output, breaks))
    async for _ in stream:
        pass
    assert same(stream.result(), whole)


def test_the_rest_is_asked_of_the_next_server_with_the_same_seed() -> None:
    cluster = Cluster([[7, 8, 9], [5], [4, 3]], [(1, LOST)])
    answer(cluster, n=3, temperature=1.0, prompt_logprobs=1)
    first, second = cluster.requests
    assert cluster.opened == [0, 1]
    assert isinstance(first.sampling["seed"], int)
    assert second.sampling == {key: value for key, value in first.sampling.items() if key != "prompt_logprobs"}
    assert (first.resume_token_ids, second.resume_token_ids) == (None, [[7], None, [4]])


@pytest.mark.parametrize(("given_", "sent"), [({"seed": 5}, 5), ({"extra_parameters": {"random_seed": 6}}, None)])
def test_a_seed_of_the_callers_own_is_kept(given_: dict[str, Any], sent: int | None) -> None:
    cluster = Cluster([[7]], [])
    answer(cluster, **given_)
    assert cluster.requests[0].sampling.get("seed") == sent


def test_output_that_was_begun_elsewhere_gets_no_new_seed() -> None:
    cluster = Cluster([[7, 8, 9]], [(1, LOST)])
    result = answer(cluster, resume_token_ids=[7])
    assert (result.token_ids, result.text) == ([8, 9], "<8><9>")
    assert "seed" not in cluster.requests[0].sampling
    assert [r.resume_token_ids for r in cluster.requests] == [[[7]], [[7, 8]]]


def test_with_one_server_nothing_is_resumed_unless_the_policy_says_so() -> None:
    cluster = Cluster([[7, 8]], [(1, LOST)], count=1)
    with pytest.raises(ServerUnreachableError) as caught:
        answer(cluster)
    assert caught.value.partial is not None and caught.value.partial.token_ids == [7]
    assert "seed" not in cluster.requests[0].sampling
    resumes = RetryPolicy(initial_delay=0.0, resume=True)
    assert answer(Cluster([[7, 8]], [(1, LOST)], count=1), resumes).token_ids == [7, 8]
    with pytest.raises(ServerUnreachableError):
        answer(Cluster([[7, 8]], [(1, LOST)]), RetryPolicy(resume=False))


def test_a_server_without_token_ids_cannot_be_continued() -> None:
    cluster = Cluster([[7, 8]], [(1, LOST)])
    cluster.speaks_ids = False
    with pytest.raises(ServerUnreachableError):
        answer(cluster)
    assert len(cluster.opened) == 1


def test_one_response_is_asked_for_again_as_a_whole() -> None:
    cluster = Cluster([[7]], [(0, LOST), (0, LOST)])
    assert answer(cluster, one_response=True, return_token_ids=False).text == "<7>"
    assert [r.resume_token_ids for r in cluster.requests] == [None] * 3


def test_the_requests_own_fault_is_not_retried() -> None:
    cluster = Cluster([[7, 8]], [(1, LOST), (0, InvalidRequestError("top_p=2 is out of range"))])
    with pytest.raises(InvalidRequestError) as caught:
        answer(cluster)
    assert caught.value.partial is not None and caught.value.partial.token_ids == [7]
    assert len(cluster.opened) == 2


def test_the_next_server_gets_the_time_that_is_left() -> None:
    cluster = Cluster([[7, 8, 9]], [(1, LOST), (1, LOST)])
    policy = RetryPolicy(initial_delay=0.05, multiplier=1, jitter=0)
    stream = Stream(GenerationRequest.build("p", None, None, {}, model="m", timeout=5.0), policy, cluster)
    list(stream)
    first, second, third = (timeout or 0.0 for timeout in cluster.timeouts)
    assert 5.0 >= first >= second + 0.05 >= third + 0.1
    late = Cluster([[7, 8]], [(1, LOST)])
    with pytest.raises(ServerUnreachableError):
        policy = RetryPolicy(initial_delay=60.0, multiplier=1, jitter=0, max_delay=60.0)
        list(Stream(GenerationRequest.build("p", None, None, {}, model="m", timeout=50.0), policy, late))
    assert len(late.opened) == 1, "no attempt starts when the time is over"


def test_attempts_are_bounded() -> None:
    cluster = Cluster([list(range(20))], [(1, LOST)] * 20)
    with pytest.raises(ServerUnreachableError) as caught:
        answer(cluster, RetryPolicy(max_attempts=3, initial_delay=0.0))
    assert len(cluster.opened) == 3
    assert caught.value.partial is not None and caught.value.partial.token_ids == [0, 1, 2]


def test_an_interruption_is_counted_once_however_many_attempts_it_takes_to_go_on() -> None:
    lost = [(0, LOST), (1, LOST), (0, LOST), (0, LOST), (1, LOST)]
    stream = Stream(request(), FAST, Cluster([[7, 8, 9]], lost))
    assert "".join(chunk.choices[0].text for chunk in stream) == "<7><8><9>"
    assert stream.resumptions == 2


def test_refusals_are_bounded_until_output_has_come() -> None:
    policy = RetryPolicy(max_attempts=9, resume_attempts=5, initial_delay=0.0, max_refusals=2)
    full = UnavailableError("the queue is full")
    for breaks, attempts in (
        ([(0, full)] * 9, 2),
        ([(0, LOST), (0, full), (0, full)], 3),
        ([(1, full)] * 9, 5),
        ([(0, LOST)] * 9, 9),
    ):
        cluster = Cluster([[5, 6, 7, 8, 9, 10, 11, 12]], breaks)
        with pytest.raises(UnavailableError):
            answer(cluster, policy)
        assert len(cluster.opened) == attempts


def test_refusals_do_not_end_an_answer_that_was_begun_elsewhere() -> None:
    policy = RetryPolicy(max_attempts=9, resume_attempts=5, initial_delay=0.0, max_refusals=1)
    cluster = Cluster([[5, 6, 7]], [(0, UnavailableError("the queue is full"))] * 4)
    assert answer(cluster, policy, resume_token_ids=[5]).token_ids == [6, 7]
    assert len(cluster.opened) == 5


def test_a_hint_does_not_end_an_answer_that_has_begun() -> None:
    policy = RetryPolicy(initial_delay=0.0, max_retry_after=0.05, outage_timeout=30.0, resume=True)
    full = UnavailableError("the queue is full; retry in 0.1 s")
    assert answer(Cluster([[5, 6]], [(0, full)], count=1), policy, resume_token_ids=[5]).token_ids == [6]
    assert answer(Cluster([[5, 6]], [(1, LOST), (0, full)], count=1), policy).token_ids == [5, 6]
    for breaks, options in (
        ([(0, full)], {}),
        ([(0, UnavailableError("the queue is full; retry in 31.0 s"))], {"resume_token_ids": [5]}),
    ):
        cluster = Cluster([[5, 6]], breaks, count=1)
        with pytest.raises(UnavailableError):
            answer(cluster, policy, **options)
        assert len(cluster.opened) == 1


def test_the_rest_of_an_answer_has_the_time_that_is_left() -> None:
    stream = Stream(GenerationRequest.build("p", None, None, {}, model="m", timeout=5.0), FAST, Cluster([[7, 8]], []))
    assert stream.rest().resume_token_ids is None
    next(stream)
    rest, later = stream.rest(), stream.rest()
    assert rest.resume_token_ids == [[7]]
    assert rest.timeout is not None and later.timeout is not None and 5.0 > rest.timeout > later.timeout > 0
    assert Stream(rest, FAST, Cluster([[7, 8]], [])).rest().resume_token_ids == [[7]]
    assert Stream(request(), FAST, Cluster([[7, 8]], [])).rest().timeout is None


def test_an_answer_whose_last_flag_was_lost_is_complete() -> None:
    cluster = Cluster([[7, 8]], [(2, LOST)])
    assert answer(cluster).token_ids == [7, 8]
    assert len(cluster.opened) == 1


def test_a_stream_that_ends_early_without_a_word_is_continued() -> None:
    class Closing(Cluster):
        def _responses(self, request: GenerationRequest, limit: int, ending: Any) -> Iterator[Any]:
            for item in super()._responses(request, limit, ending):
                if item is None:
                    return
                yield item

    cluster = Closing([[7, 8]], [(1, None)])
    assert answer(cluster).token_ids == [7, 8]
    assert cluster.opened == [0, 1]


# -- silence -------------------------------------------------------------------------------


def checked(cluster: Cluster, after: float = 100.0) -> threading.Event:
    """Looks at the watched streams as the client's thread does, as if `after` seconds had passed."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for stream in list(cluster.watched):
                stream.check_stall(time.monotonic() + after, {})

    threading.Thread(target=look, daemon=True).start()
    return done


@pytest.mark.parametrize("received", [0, 1])
def test_a_stream_that_waits_in_vain_goes_on_elsewhere(received: int) -> None:
    cluster = Cluster([[7, 8]], [(received, threading.Event)])
    cluster.is_well = received > 0  # silence before the output may be a queue: then the server is asked
    done = checked(cluster)
    assert answer(cluster).token_ids == [7, 8]
    done.set()
    assert cluster.opened == [0, 1]


def test_a_request_in_a_queue_waits_as_long_as_its_server_is_well() -> None:
    cluster = Cluster([[7, 8]], [(0, threading.Event)])
    asked = threading.Event()
    cluster.responds = lambda index, model: asked.set() or True  # type: ignore[method-assign]
    done = checked(cluster)
    stream = Stream(request(), FAST, cluster)
    threading.Thread(target=lambda: (asked.wait(20), stream.cancel()), daemon=True).start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    done.set()
    assert cluster.opened == [0]


@pytest.mark.parametrize("received", [0, 1])
async def test_asyncio_a_stream_that_waits_in_vain_goes_on_elsewhere(received: int) -> None:
    cluster = AsyncCluster([[7, 8]], [(received, threading.Event)])
    cluster.is_well = received > 0
    stream = AsyncStream(request(), FAST, cluster)
    assert [chunk.token_ids async for chunk in stream] == [[7], [8]]
    assert cluster.opened == [0, 1]


async def test_asyncio_every_attempt_is_watched() -> None:
    cluster = AsyncCluster([[7, 8, 9]], [(1, threading.Event), (1, threading.Event)])
    stream = AsyncStream(request(), FAST, cluster)
    assert [chunk.token_ids async for chunk in stream] == [[7], [8], [9]]
    assert len(cluster.opened) == 3


async def test_asyncio_a_reader_that_takes_its_time_is_no_stall() -> None:
    cluster = AsyncCluster([[7, 8]], [])
    stream = AsyncStream(request(), FAST, cluster)
    await anext(stream)
    stream.check_stall(time.monotonic() + 100)  # no task waits for a response
    assert [chunk.token_ids async for chunk in stream] == [[8]]
    assert cluster.opened == [0]


async def test_asyncio_a_request_in_a_queue_waits_as_long_as_its_server_is_well() -> None:
    cluster = AsyncCluster([[7, 8]], [(0, threading.Event)])
    stream = AsyncStream(request(), FAST, cluster)
    calls = []

    async def ready(index: int, model: str) -> bool:
        calls.append(index)
        if len(calls) == 2:
            stream.cancel()
        return True

    cluster.responds = ready  # type: ignore[method-assign]
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    assert (cluster.opened, calls) == ([0], [0, 0])


@pytest.mark.parametrize(
    ("is_ready", "error", "responds"),
    [
        (True, None, True),
        (True, InvalidRequestError("control='model': must be ..."), True),
        (True, DeadlineExceededError("deadline exceeded"), False),
        (True, ServerUnreachableError("lost the connection"), False),
        (True, UnavailableError("Stub process 'm_0_0' is not healthy."), False),
        (False, None, False),
    ],
)
async def test_a_server_responds_if_its_model_answers_anything(
    is_ready: bool, error: Exception | None, responds: bool
) -> None:
    """Triton reports a model as ready whose stub is stopped."""

    class Transport:
        def model_ready(self, model: str) -> bool:
            return is_ready

        def control(self, model: str, question: Any, timeout: float) -> str:
            assert question.parameters == {"control": "model"}
            if error is not None:
                raise error
            return "{}"

        def close(self) -> None: ...

    class AsyncTransport(Transport):
        async def model_ready(self, model: str) -> bool:  # type: ignore[override]
            return Transport.model_ready(self, model)

        async def control(self, model: str, question: Any, timeout: float) -> str:  # type: ignore[override]
            return Transport.control(self, model, question, timeout)

    connections = [Connection.build("127.0.0.1:1", "grpc", {})]
    blocking, asynchronous = BlockingServers(connections, None), AsyncServers(connections)
    blocking._opened[0], asynchronous._opened[0] = Transport(), AsyncTransport()
    assert blocking.responds(0, "m") is blocking.any_responds("m") is responds
    assert await asynchronous.responds(0, "m") is await asynchronous.any_responds("m") is responds
    blocking.close()
    assert not blocking.responds(0, "m")


# -- which server is next ------------------------------------------------------------------


def test_the_first_that_did_not_fail_lately_is_next() -> None:
    now = [0.0]
    endpoints = Endpoints(3, lambda: now[0])
    assert endpoints.choose() == 0
    endpoints.failed(0)
    assert endpoints.choose() == 1
    endpoints.failed(1, retry_after=10.0)
    endpoints.failed(2)
    now[0] = 0.9
    assert endpoints.choose() == 0, "all rest: the one whose rest ends first"
    assert endpoints.asked_wait() == 0.0
    now[0] = 1.1
    endpoints.failed(0)
    now[0] = 3.0
    assert endpoints.choose() == 2, "its rest was doubled"
    now[0] = 3.2
    assert endpoints.choose() == 0
    endpoints.answered(1)
    endpoints.failed(0)
    assert endpoints.choose() == 1


def test_a_sequence_ends_once_though_its_server_repeats_that_it_has() -> None:
    stream = Stream(request(n=2), FAST, Cluster([[7], [8, 9]], []))
    assert [[delta.finish_reason for delta in chunk.choices] for chunk in stream] == [
        ["length", None],
        [None, "length"],
    ]
    assert [choice.finish_reason for choice in stream.result().choices] == ["length", "length"]


class Chosen:
    """Routing that takes the last server, and records the loads."""

    def __init__(self) -> None:
        self.loads: list[dict[int, int]] = []

    def choose(self, request: GenerationRequest, loads: Mapping[int, int]) -> int:
        self.loads.append(dict(loads))
        return max(loads)


def test_a_routing_chooses_among_those_that_did_not_fail_lately_and_sees_what_is_in_flight() -> None:
    chosen = Chosen()
    cluster = Cluster([[7, 8], [9]], [(1, LOST), (1, None)], count=3)
    cluster.endpoints = Endpoints(3, routing=chosen)
    stream = Stream(request(n=2), FAST, cluster)
    assert next(stream).choices[0].text == "<7>"
    other = Stream(request(), FAST, cluster)
    assert (cluster.opened, chosen.loads) == ([2, 2], [{0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 2}])
    list(stream)
    assert (cluster.opened[2:], chosen.loads[2:]) == ([1], [{0: 0, 1: 0}]), "an interrupted attempt is not in flight"
    assert stream.resumptions == 1
    other.cancel()
    other.cancel()
    other.close()
    cluster.endpoints.answered(2)
    Stream(request(), FAST, cluster).close()
    assert chosen.loads[-1] == {0: 0, 1: 0, 2: 0}


def test_a_server_that_cannot_be_opened_counts_nothing() -> None:
    chosen = Chosen()
    cluster = Cluster([[7]], [])
    cluster.endpoints = Endpoints(2, routing=chosen)
    works, cluster.open = cluster.open, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        Stream(request(), FAST, cluster)
    cluster.open = works  # type: ignore[method-assign]
    assert answer(cluster).text == "<7>" and chosen.loads == [{0: 0, 1: 0}] * 2


async def test_an_unread_stream_is_not_in_flight_once_it_is_cancelled() -> None:
    chosen = Chosen()
    cluster = AsyncCluster([[7]], [])
    cluster.endpoints = Endpoints(2, routing=chosen)
    AsyncStream(request(), FAST, cluster).cancel()
    AsyncStream(request(), FAST, cluster).cancel()
    assert chosen.loads == [{0: 0, 1: 0}] * 2


def test_a_server_is_left_alone_as_long_as_it_asks_if_there_is_no_other() -> None:
    hint = UnavailableError("the model is draining: it takes no new requests; retry in 0.2 s")
    assert hint.retry_after == 0.2
    cluster = Cluster([[7]], [(0, hint)], count=1)
    result = answer(cluster)
    assert result.timings.ttft is not None and result.timings.ttft >= 0.2
    cluster = Cluster([[7]], [(0, UnavailableError("full; retry in 3600 s"))], count=2)
    assert answer(cluster).text == "<7>", "the other one does not ask for it"
    with pytest.raises(UnavailableError, match="retry in 3600 s"):
        answer(Cluster([[7]], [(0, UnavailableError("full; retry in 3600 s"))], count=1))


def test_the_hint_of_a_message() -> None:
    for message, seconds in [
        ("x; retry in 2 s", 2.0),
        ("x; retry in 0.3 s", 0.3),
        ("x; retry in 12 s and more", None),
        ("x", None),
    ]:
        assert UnavailableError(message).retry_after == seconds


def test_addresses() -> None:
    for url, urls in [(None, [None]), ("a:1", ["a:1"]), ("a:1, b:2", ["a:1", "b:2"]), (["a:1", "b:2"], ["a:1", "b:2"])]:
        assert split_urls(url) == urls


@pytest.mark.parametrize("url", [[], "a:1,", ["a:1", ""]])
def test_no_addresses(url: Any) -> None:
    with pytest.raises(ValueError, match="url="):
        Client(url)


# -- through tritonserver ------------------------------------------------------------------


@pytest.fixture
def addresses(address: str) -> str:
    """No server listens at the first address."""
    return f"127.0.0.1:{pick_ports(1)[0]},{address}"


def test_a_server_that_is_down_is_passed_over(addresses: str, protocol: Any) -> None:
    with Client(addresses, protocol=protocol, model="scripted") as client:
        result = client.generate("one two")
        assert (result.text, result.attempts) == ("one two", 2)
        assert client.generate("one two").attempts == 1, "the other one is known to be down"
        assert client.ready() and client.health()
        assert client.metadata()["name"] == "scripted"
        assert client.server_metadata()["name"] == "triton"
        assert client.control("step_trace") == "answer to step_trace"


async def test_asyncio_a_server_that_is_down_is_passed_over(addresses: str, protocol: Any) -> None:
    async with AsyncClient(addresses, protocol=protocol, model="scripted") as client:
        assert await client.health() and await client.ready()
        assert (await client.metadata())["name"] == "scripted"
        assert (await client.generate("one two")).text == "one two"


def test_the_endpoint_that_answers_decides_the_protocol(addresses: str, protocol: str) -> None:
    found, urls = find_endpoints(addresses)
    assert (found, urls) == (protocol, [f"{protocol}://{one}" for one in addresses.split(",")])


def test_the_model_gets_what_was_received(scripted: TritonServer, protocol: Any, seen: Any, key: str) -> None:
    """Of a stream that a server ended with UNAVAILABLE; the scripted model knows no resumption and refuses it."""
    address = scripted.grpc_address if protocol == "grpc" else scripted.http_address
    refusal = {"code": "UNAVAILABLE", "error": "the model is draining; retry in 0.0 s"}
    policy = RetryPolicy(resume=True, initial_delay=0.0)
    with Client(address, protocol=protocol, model="scripted", retries=policy) as client:
        text = json.dumps({"key": key, "tokens": 2, **refusal})
        with pytest.raises(InvalidRequestError, match="resume_token"):
            client.generate(text)
    assert seen(key)["requests"] == 1


class Answers:
    """Servers whose answer to a question is known: a value, or an error."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    def servers(self) -> BlockingServers:
        connections = [Connection.build(f"127.0.0.1:{port}", "grpc", {}) for port in range(1, 1 + len(self.answers))]
        servers = BlockingServers(connections, None)
        servers._opened = dict(enumerate(self.answers))
        return servers


def said(server: Any) -> Any:
    if isinstance(server, Exception):
        raise server
    return server


ENDS = InvalidRequestError("Request for unknown model: 'm' has no available versions", code="NOT_FOUND")
LOADS = UnavailableError("the model is not ready")


@pytest.mark.parametrize("first", [LOST, ENDS, LOADS])
def test_a_question_goes_to_the_next_server_if_the_first_has_no_models(first: Exception) -> None:
    assert Answers(first, "here").servers().first(said) == "here"


def test_a_question_that_is_wrong_goes_to_one_server_only() -> None:
    with pytest.raises(InvalidRequestError, match="off"):
        Answers(InvalidRequestError("n is off"), "here").servers().first(said)


@pytest.mark.parametrize(
    ("failures", "told"), [((LOST, ENDS, LOST), ENDS), ((LOADS, ENDS), LOADS), ((LOST, LOST), LOST)]
)
def test_what_a_server_says_is_told_rather_than_that_another_cannot_be_reached(failures: Any, told: Any) -> None:
    with pytest.raises(type(told)) as caught:
        Answers(*failures).servers().first(said)
    assert caught.value is told
