"""A Triton for prompts whose name has several addresses."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from scripted_client import ScriptedClient, text

from inflight_client.connection import Connection
from inflight_client.request import GenerationRequest
from inflight_gateway.handover import HandoverUpstream, PrefillTriton, num_addresses, with_handover
from inflight_gateway.handover_policy import Costs
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream

OPTIONS = GatewayOptions(triton=("d:1",), prefill_triton=("prompts:1",))


def upstream() -> Upstream:
    return Upstream(OPTIONS, ScriptedClient(lambda request: text("a")))  # type: ignore[arg-type]


async def test_prompts_go_to_its_servers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    build = Connection.build

    def record(url: Any, protocol: Any, settings: Any) -> Connection:
        made.append(settings.get("round_robin", False))
        return build(url, protocol, settings)

    monkeypatch.setattr(Connection, "build", record)
    await with_handover(OPTIONS, upstream(), lambda _: None, lambda _: None).close()
    assert made and all(made)


async def test_they_share_the_prompts_before_the_next_one() -> None:
    """Twelve prompts behind a name of four do not keep a prompt from it that three would not keep from one."""
    now, counts = 0.0, [4, 2]

    async def count(address: str) -> int:
        assert address == "prompts:1"
        return counts.pop(0)

    prefill = PrefillTriton("prompts:1", upstream(), lambda: now, count)
    prefill.queued = 1200
    assert prefill.ahead == 1200
    for seconds, expected in ((0.0, 300), (0.0, 300), (5.0, 600)):
        now += seconds
        await prefill.facts("demo")
        await asyncio.sleep(0)  # it counts beside the prompt
        assert prefill.ahead == expected
    assert not counts
    await prefill.close()


async def test_a_slow_name_server_delays_no_prompt() -> None:
    asked = 0

    async def count(_: str) -> int:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        return 1

    now = 0.0
    prefill = PrefillTriton("prompts:1", upstream(), lambda: now, count)
    for _ in range(3):
        assert await prefill.facts("demo")
        await asyncio.sleep(0)
        now += 10.0
    assert asked == 1, "one question at a time"
    await prefill.close()


@pytest.mark.parametrize(("servers", "handed_over"), [(1, False), (8, True)])
async def test_auto_counts_the_queue_of_one_server(servers: int, handed_over: bool) -> None:

    async def count(_: str) -> int:
        return servers

    prefill = PrefillTriton("prompts:1", upstream(), count=count)
    await prefill.facts("demo")
    await asyncio.sleep(0)
    both = HandoverUpstream(upstream(), [prefill], "auto")
    costs = both._costs["demo"]
    costs.alone.add(time.monotonic(), 0.001)
    costs.prefill.add(time.monotonic(), 0.001)
    prefill.queued = 4000
    request = GenerationRequest.build(None, None, list(range(1000)), {}, model="demo", timeout=None)
    stream = both.send(request)
    assert bool(getattr(stream, "_prefills", ())) is handed_over


async def test_a_name_that_is_not_known_for_a_while_keeps_its_number() -> None:
    now, counts = 0.0, [4, None, 2]

    async def count(_: str) -> int | None:
        return counts.pop(0)

    prefill = PrefillTriton("prompts:1", upstream(), lambda: now, count)
    prefill.queued = 1200
    for expected in (300, 300, 600):
        await prefill.facts("demo")
        await asyncio.sleep(0)
        assert prefill.ahead == expected
        now += 5.0
    assert not counts
    await prefill.close()


async def test_the_patience_is_for_the_queue_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[int] = []

    def patience(self: Costs, now: float, tokens: int) -> float:
        waited_for.append(tokens)
        return 60.0

    async def count(_: str) -> int:
        return 4

    monkeypatch.setattr(Costs, "patience", patience)
    prefill = PrefillTriton("prompts:1", upstream(), count=count)
    await prefill.facts("demo")
    await asyncio.sleep(0)
    prefill.queued = 4000
    both = HandoverUpstream(upstream(), [prefill], "100")
    request = GenerationRequest.build(None, None, list(range(300)), {}, model="demo", timeout=None)
    assert [chunk.text async for chunk in both.send(request)] == ["a"]
    assert waited_for == [1300] and prefill.queued == 4000
    await prefill.close()


async def test_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await num_addresses("127.0.0.1:1") == await num_addresses("[::1]:1") == 1
    assert await num_addresses("a..b:1") is None, "no name"

    def found(*_: Any, **__: Any) -> Any:
        tcp = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*tcp, ("10.0.0.1", 0)), (*tcp, ("10.0.0.2", 0)), (socket.AF_INET6, *tcp[1:], ("fd00::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert await num_addresses("prompts:1") == 2
