"""The choice among several servers, and errors that name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from client_cluster import FAST, LOST, AsyncCluster, Cluster, answer, request

from inflight_client import (
    AsyncStream,
    Client,
    InvalidRequestError,
    Stream,
    UnavailableError,
)
from inflight_client.connection import Connection
from inflight_client.endpoints import Endpoints, split_urls
from inflight_client.request import GenerationRequest
from inflight_client.servers import BlockingServers


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
