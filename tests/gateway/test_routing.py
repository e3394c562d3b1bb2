"""`--routing`: which Triton gets a request."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_client import ScriptedClient, text

from inflight_client.endpoints import Endpoints
from inflight_client.request import GenerationRequest
from inflight_gateway.metrics import Metrics
from inflight_gateway.options import GatewayOptions
from inflight_gateway.routing import Policy, Router, prefix_key
from inflight_gateway.upstream import Upstream

SERVERS = ("a:8001", "b:8001", "c:8001")
LONG = "The quick brown fox jumps over the lazy dog, and then it does so again. "
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hello"}]
IDS = list(range(100, 120))


def request(prompt: Any = LONG, **options: Any) -> GenerationRequest:
    """Of a text, token ids, or the messages of a chat."""
    is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    given = [prompt if isinstance(prompt, str) else None, prompt if is_chat else None]
    ids = None if isinstance(prompt, str) or is_chat else prompt
    return GenerationRequest.build(*given, ids, options, model="demo", timeout=None)  # type: ignore[arg-type]


def router(policy: Policy, chosen: list[tuple[str, str]] | None = None) -> Router:
    record = [] if chosen is None else chosen
    return Router(policy, SERVERS, 256, 1.25, lambda server, why: record.append((server, why)))


def endpoints(policy: Policy) -> tuple[Endpoints, list[float]]:
    """Of three servers, and the time."""
    now = [0.0]
    return Endpoints(len(SERVERS), lambda: now[0], router(policy)), now


# -- the policies --------------------------------------------------------------------------


def test_round_robin_passes_over_a_server_that_failed_until_it_has_rested() -> None:
    found, now = endpoints("round-robin")
    assert [found.begin(request()) for _ in range(4)] == [0, 1, 2, 0]
    found.failed(2)
    assert [found.begin(request()) for _ in range(4)] == [1, 0, 1, 0]
    now[0] = 1.5
    assert [found.begin(request()) for _ in range(4)] == [1, 2, 0, 1]


def test_least_loaded_counts_sequences_and_lets_equals_take_turns() -> None:
    found, _ = endpoints("least-loaded")
    big = request(n=3)
    assert [found.begin(big), *(found.begin(request()) for _ in range(6))] == [0, 1, 2, 1, 2, 1, 2]
    found.end(0, big)
    assert found.begin(request()) == 0


def test_requests_with_the_same_beginning_meet_on_one_server() -> None:
    found, _ = endpoints("prefix")
    long = LONG * 20
    for _ in range(3):
        one = request(long + "How many?", tenant="t")
        home = found.begin(one)
        found.end(home, one)
        other = request(long + "Who?", tenant="t", seed=3, n=2)
        assert found.begin(other) == home
        found.end(home, other)
    homes = {found.begin(request(f"{number}. {long}")) for number in range(20)}
    assert homes == {0, 1, 2}


def test_a_server_that_dies_leaves_the_ring_and_comes_back() -> None:
    chosen: list[tuple[str, str]] = []
    now = [0.0]
    found = Endpoints(len(SERVERS), lambda: now[0], router("prefix", chosen))
    home = found.begin(request())
    found.failed(home)
    away = found.begin(request())
    assert away != home
    now[0] = 1.5
    assert found.begin(request()) == home
    assert [why for _, why in chosen] == ["home", "failover", "home"]
    assert [server for server, _ in chosen] == [SERVERS[home], SERVERS[away], SERVERS[home]]


def test_a_hot_prefix_spills_over_and_a_short_prompt_goes_where_there_is_room() -> None:
    chosen: list[tuple[str, str]] = []
    found = Endpoints(len(SERVERS), routing=router("prefix", chosen))
    used = [found.begin(request()) for _ in range(60)]
    assert {used.count(server) for server in range(3)} <= set(range(10, 27)), used
    assert [why for _, why in chosen][:8] == ["home"] * 8 and ("spilled" in {why for _, why in chosen})
    fewest = min(range(3), key=used.count)
    assert found.begin(request("Hi")) == fewest and chosen[-1][1] == "balanced"


# -- the key -------------------------------------------------------------------------------


def test_prompts_that_begin_alike_have_the_same_key() -> None:
    long = LONG * 20
    assert prefix_key(request(long + "a"), 256) == prefix_key(request(long + "b"), 256)
    assert prefix_key(request(long + "a"), 512) != prefix_key(request(long + "b"), 512)
    ids = list(range(300))
    assert prefix_key(request([*ids, 1]), 256) == prefix_key(request([*ids, 2]), 256)
    turns = [{"role": "system", "content": long}, {"role": "user", "content": "One"}]
    more = [*turns, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"}]
    assert prefix_key(request(turns), 256) == prefix_key(request(more), 256)


OTHERS: list[GenerationRequest] = [
    request(LONG, tenant="a"),
    request(LONG, tenant="b"),
    request(LONG, cache_salt="a"),
    request(LONG, routing_key="a"),
    request(LONG, model="other"),
    request(LONG, adapter="a"),
    request(LONG, adapter="b"),
    request(LONG),
    request("A" + LONG),
    request(IDS),
    request([*IDS[1:], 5]),
    request(CHAT),
    request([{**CHAT[0], "role": "user"}, CHAT[1]]),
    request(CHAT, tools=[{"type": "function", "function": {"name": "f"}}]),
    request([{"role": "user", "content": [{"type": "text", "text": LONG}]}]),
]


def test_what_cannot_share_a_block_has_another_key() -> None:
    keys = [prefix_key(one, 256) for one in OTHERS]
    assert None not in keys and len(set(keys)) == len(OTHERS)


def test_a_prompt_that_fills_no_block_has_no_key() -> None:
    for prompt in ["", "Hi", IDS[:15], [{"role": "user", "content": None}]]:
        assert prefix_key(request(prompt), 256) is None


# -- through the gateway -------------------------------------------------------------------


def test_the_upstream_counts_what_it_chose() -> None:
    """No server listens at these addresses: the requests are only opened."""
    metrics = Metrics()
    options = GatewayOptions(triton=SERVERS, routing="round-robin")
    upstream = Upstream(options, routed=metrics.routed)
    for one in SERVERS:
        assert upstream.client._servers.endpoints.begin(request()) == SERVERS.index(one)
    shown = metrics.text().decode()
    for one in SERVERS:
        assert f'inflight_gateway_routed_requests_total{{triton="{one}",why="balanced"}} 1.0' in shown


async def test_the_cache_key_of_a_body_reaches_the_router(start: Any) -> None:
    client = ScriptedClient(lambda _: text("a"))
    gateway = await start(client)
    for path, body in (
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": LONG}),
    ):
        assert (await gateway.post(path, {**body, "prompt_cache_key": "talk 7"})).status_code == 200
    assert [one.routing_key for one in client.requests] == ["talk 7"] * 3


def test_wrong_options_are_refused() -> None:
    for wrong, said in [
        ({"routing": "random"}, "must be one of ordered, round-robin, least-loaded, prefix"),
        ({"routing": "prefix", "triton": ("a:1", "a:1")}, "each of them once"),
        ({"routing": "prefix", "routing_load_factor": 0.5}, "load_factor"),
        ({"routing_prefix_tokens": 0}, "routing_prefix_tokens"),
    ]:
        with pytest.raises(ValueError, match=said):
            GatewayOptions(**wrong)
