"""The next server goes on with a stream that was interrupted, and gets what came so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from client_cluster import FAST, LOST, AsyncCluster, Cluster, answer, request, same
from hypothesis import given
from hypothesis import strategies as st

from inflight_client import (
    AsyncClient,
    AsyncStream,
    Client,
    InvalidRequestError,
    RequestCancelledError,
    RetryPolicy,
    ServerUnreachableError,
    Stream,
    UnavailableError,
)
from inflight_client.endpoint import find_endpoints
from inflight_client.request import GenerationRequest
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

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


async def test_what_came_before_a_cancellation_is_not_read_after_it() -> None:
    policy = RetryPolicy(stall_timeout=None)
    stream = Stream(request(), policy, Cluster([[7, 8, 9]], []))
    assert next(stream).token_ids == [7]
    stream.cancel()
    with pytest.raises(RequestCancelledError) as caught:
        next(stream)
    assert caught.value.partial is not None and caught.value.partial.token_ids == [7]
    assert list(stream) == []
    waits = AsyncStream(request(), policy, AsyncCluster([[7, 8, 9]], []))
    waits.cancel()
    with pytest.raises(RequestCancelledError):
        await anext(waits)
    assert [chunk async for chunk in waits] == []
