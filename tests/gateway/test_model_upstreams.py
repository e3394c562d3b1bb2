"""A gateway in front of several models, each with Tritons of its own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest
from scripted_client import ScriptedClient, text

from inflight_client import ServerUnreachableError
from inflight_client.connection import Connection
from inflight_gateway.app import build_app
from inflight_gateway.errors import APIError
from inflight_gateway.gateway import Gateway
from inflight_gateway.model_upstreams import ModelUpstreams, upstream_for
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream
from inflight_gateway.waiting import WaitingRequests


class Fleet:
    """Models and the scripted clients behind them; `others` serves models without Tritons of their own."""

    def __init__(self, others: tuple[str, ...] = ()) -> None:
        self.clients = {name: self._client(name) for name in ("qwen", "llama")}
        self.others = self._client("others", others) if others else None
        named = {name: self._upstream(client, name) for name, client in self.clients.items()}
        others = None if self.others is None else self._upstream(self.others)
        self.upstreams = ModelUpstreams(named, others, WaitingRequests(1024))

    @staticmethod
    def _client(name: str, models: tuple[str, ...] = ()) -> ScriptedClient:
        return ScriptedClient(lambda request: text(f"from {name}"), models or (name,))

    @staticmethod
    def _upstream(client: ScriptedClient, *models: str) -> Upstream:
        return Upstream(GatewayOptions(models=models, reconnect_timeout=0), client)

    def breaks(self, name: str) -> None:
        """The Tritons of a model cannot be reached."""

        async def unreachable(*_: Any, **__: Any) -> Any:
            raise ServerUnreachableError(f"cannot reach {name}")

        client: Any = self.clients[name]
        client.metadata = client.responds = unreachable


@pytest.fixture
async def front() -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    fleet = Fleet()
    options = GatewayOptions()
    app = build_app(options, Gateway(options, fleet.upstreams))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        yield fleet, http


async def test_a_request_goes_to_the_tritons_of_its_model(front: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, http = front
    assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["qwen", "llama"]
    for name in ("qwen", "llama"):
        answer = await http.post("/v1/completions", json={"model": name, "prompt": "Hello"})
        assert answer.json()["choices"][0]["text"] == f"from {name}"
        assert [request.model for request in fleet.clients[name].requests] == [name]


async def test_an_unknown_model_or_none_is_refused_with_the_names(front: tuple[Fleet, httpx.AsyncClient]) -> None:
    _, http = front
    unknown = await http.post("/v1/completions", json={"model": "gemma", "prompt": "Hello"})
    assert unknown.status_code == 404 and "qwen, llama" in unknown.json()["error"]["message"]
    none = await http.post("/v1/completions", json={"prompt": "Hello"})
    assert none.status_code == 400 and "models here: qwen, llama" in none.json()["error"]["message"]


async def test_a_model_that_cannot_be_reached_leaves_the_others(front: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, http = front
    fleet.breaks("qwen")
    assert (await http.get("/ready")).status_code == 200
    assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["llama"]
    assert (await http.post("/v1/completions", json={"model": "qwen", "prompt": "Hello"})).status_code == 503
    assert (await http.post("/v1/completions", json={"model": "llama", "prompt": "Hello"})).status_code == 200


async def test_without_any_the_gateway_says_why() -> None:
    fleet = Fleet()
    fleet.breaks("qwen")
    fleet.breaks("llama")
    assert not await fleet.upstreams.ready()
    with pytest.raises(APIError, match="cannot reach"):
        await fleet.upstreams.models()


async def test_questions_about_texts_go_to_the_model() -> None:
    fleet = Fleet()
    model = await fleet.upstreams.resolve("llama")
    assert (await fleet.upstreams.tokenize(model, prompt="Hi"))["tokens"] == [72, 105]
    assert await fleet.upstreams.detokenize(model, [72, 105]) == "Hi"
    assert (await fleet.upstreams.tokenizer_info(model))["tokenizer_class"] == "Toy"
    assert len(fleet.clients["llama"].questions) == 1 and not fleet.clients["qwen"].questions
    await fleet.upstreams.close()


async def test_tritons_without_a_name_serve_all_other_models() -> None:
    fleet = Fleet(others=("gemma", "qwen"))
    assert fleet.others is not None
    assert {model.name for model in await fleet.upstreams.models()} == {"qwen", "llama", "gemma"}
    for name in ("gemma", "qwen"):
        fleet.upstreams.stream(prompt="Hello", model=(await fleet.upstreams.resolve(name)).name)
    assert [request.model for request in fleet.others.requests] == ["gemma"]
    assert [request.model for request in fleet.clients["qwen"].requests] == ["qwen"]
    with pytest.raises(APIError, match="does not exist"):
        await fleet.upstreams.resolve("phi")


def test_addresses_are_grouped_by_model() -> None:
    given = ("qwen2.5=a:8001", "c:8001", "qwen2.5=b:8001")
    options = GatewayOptions(triton=given)
    assert options.triton_groups == {"qwen2.5": ("a:8001", "b:8001"), "": ("c:8001",)}
    assert isinstance(upstream_for(options, lambda *_: None), ModelUpstreams)
    assert isinstance(upstream_for(GatewayOptions(triton=("a:8001", "b:8001")), lambda *_: None), Upstream)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"triton": ("=a:8001",)}, "MODEL=HOST:PORT"),
        ({"triton": ("qwen=",)}, "MODEL=HOST:PORT"),
        ({"triton": ("qwen=a:8001", "qwen=a:8001"), "routing": "prefix"}, "a:8001"),
        ({"triton": ("qwen=a:8001",), "models": ("qwen", "llama")}, "'llama'"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GatewayOptions(**options)


@pytest.mark.parametrize(("balanced", "served"), [(True, {1, 2, 3}), (False, {1})])
async def test_a_name_with_several_addresses_gets_requests_in_turn_if_asked(balanced: bool, served: set[int]) -> None:
    """As a headless Service's name has: the address of each pod."""
    counts = dict.fromkeys(served, 0)
    servers = []
    port = 0
    for host in (1, 2, 3):

        async def answer(request: bytes, context: Any, host: int = host) -> bytes:
            counts[host] += 1  # fails for a host that should not be asked
            return b""

        handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inflight.Test", handlers),))
        port = server.add_insecure_port(f"127.0.0.{host}:{port}")
        await server.start()
        servers.append(server)
    target = "ipv4:" + ",".join(f"127.0.0.{host}:{port}" for host in (1, 2, 3))
    arguments = Connection.build(target, "grpc", {"round_robin": balanced}).grpc_client_options()["channel_args"]
    async with grpc.aio.insecure_channel(target, arguments) as channel:
        ask = channel.unary_unary("/inflight.Test/Ask")
        while min(counts.values()) < 5:  # the connections come up one by one
            await ask(b"", wait_for_ready=True)
    for server in servers:
        await server.stop(None)


def test_round_robin_is_an_option_of_grpc_alone() -> None:
    with pytest.raises(ValueError, match="round_robin"):
        Connection.build(None, "http", {"round_robin": True})


async def test_an_adapter_leads_to_the_tritons_of_its_model(front: tuple[Fleet, httpx.AsyncClient]) -> None:
    fleet, http = front
    for name, adapters in (("qwen", {"doll": "a" * 32, "both": "b" * 32}), ("llama", {"sheep": "c" * 32, "both": "d"})):
        fleet.clients[name].info = {**fleet.clients[name].info, "adapters": adapters}
    for model, client, adapter in (
        ("sheep", "llama", "sheep"),
        ("doll", "qwen", "doll"),
        ("llama", "llama", None),
        ("llama/both", "llama", "both"),
    ):
        answer = await http.post("/v1/completions", json={"model": model, "prompt": "a"})
        assert answer.status_code == 200, answer.text
        sent = fleet.clients[client].requests[-1]
        assert (sent.model, sent.adapter) == (client, adapter)
    assert (await http.post("/v1/completions", json={"model": "both", "prompt": "a"})).status_code == 404
    fleet.breaks("qwen")
    assert (await http.post("/v1/completions", json={"model": "sheep", "prompt": "a"})).status_code == 200
    assert (await http.post("/v1/completions", json={"model": "unknown", "prompt": "a"})).status_code == 404


async def test_a_model_comes_before_an_adapter_of_its_name() -> None:
    client = ScriptedClient(lambda request: text("an answer"), ("foo", "bar"))

    async def info(model: str, timeout: float = 60.0) -> dict[str, Any]:
        return {**client.info, "adapters": {"foo": "a" * 32} if model == "bar" else None}

    client.model_info = info  # type: ignore[method-assign]
    upstream = Upstream(GatewayOptions(reconnect_timeout=0), client)
    await upstream.models()
    upstream._known["foo"] = float("-inf"), upstream._known["foo"][1]  # asked long ago, and bar a moment ago
    found = await upstream.find("foo")
    assert (found.name, found.adapter) == ("foo", None)


async def test_a_model_of_the_other_tritons_comes_before_an_adapter_and_asks_nobody_else() -> None:
    fleet = Fleet(others=("gemma",))
    for client in fleet.clients.values():
        client.info = {**client.info, "adapters": {"gemma": "a" * 32}}
    fleet.breaks("llama")
    asked = []
    fleet.clients["qwen"].metadata = lambda model: asked.append(model)  # type: ignore[method-assign, assignment]
    found = await fleet.upstreams.find("gemma")
    assert (found.name, found.adapter, asked) == ("gemma", None, [])


async def test_adapters_of_a_model_that_does_not_answer_are_still_known() -> None:
    client = ScriptedClient(lambda request: text("an answer"), ("foo",))
    client.info = {**client.info, "adapters": {"doll": "a" * 32}}
    upstream = Upstream(GatewayOptions(reconnect_timeout=0), client)
    assert "doll" in (await upstream.models())[0].adapters
    client.is_silent = True
    upstream.forget()  # as a request for an unknown name does
    assert await upstream.adapter("none") is None
    found = await upstream.find("doll")
    assert (found.name, found.adapter) == ("foo", "doll")


class NoList(ScriptedClient):
    """A client whose server cannot be reached; each attempt lasts until `ends` is set.

    Attributes:
        asked: the number of attempts.
        begun: set by each attempt.
    """

    def __init__(self) -> None:
        super().__init__(lambda request: text("an answer"))
        self.asked, self.begun, self.ends = 0, asyncio.Event(), asyncio.Event()

    async def repository_index(self) -> list[dict[str, Any]]:
        self.asked += 1
        self.begun.set()
        await self.ends.wait()
        raise ServerUnreachableError("cannot reach 127.0.0.1:1")


async def test_calls_that_wait_for_one_that_fails_fail_with_it() -> None:
    """Where each attempt lasts until its time is up, they would else fail one after another."""
    client = NoList()
    upstream = Upstream(GatewayOptions(reconnect_timeout=0), client)
    calls = [asyncio.create_task(upstream.models()) for _ in range(5)]
    await client.begun.wait()
    client.ends.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert client.asked == 1
    assert [isinstance(one, APIError) and one.code for one in found] == ["upstream_unreachable"] * 5
    assert len({id(one) for one in found}) == 5, "each has its own, with the frames of its own caller"
    assert len({(one.status, one.message, *one.headers.items()) for one in found if isinstance(one, APIError)}) == 1
    with pytest.raises(APIError):
        await upstream.models()
    assert client.asked == 2, "a later call asks again"


async def test_the_next_call_asks_if_the_first_is_cancelled() -> None:
    client = NoList()
    upstream = Upstream(GatewayOptions(reconnect_timeout=0), client)
    calls = [asyncio.create_task(upstream.models()) for _ in range(3)]
    await client.begun.wait()
    client.begun.clear()
    calls[0].cancel()
    await client.begun.wait()
    client.ends.set()
    first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError) and client.asked == 2
    assert [isinstance(one, APIError) and one.code for one in others] == ["upstream_unreachable"] * 2


async def test_a_failed_request_leaves_nothing_behind() -> None:
    """Such as its body; also after the server is back, and nothing fails any more."""

    class Body:
        pass

    client = NoList()
    upstream, kept = Upstream(GatewayOptions(reconnect_timeout=0), client), []

    async def request() -> None:
        body = Body()
        kept.append(weakref.ref(body))
        await upstream.models()

    calls = [asyncio.create_task(request()) for _ in range(2)]
    await client.begun.wait()
    client.ends.set()
    assert all(isinstance(one, APIError) for one in await asyncio.gather(*calls, return_exceptions=True))
    del calls
    await asyncio.sleep(0)  # the event loop has let go of what it handed over last
    gc.collect()
    assert [one() for one in kept] == [None, None]


class NoAnswer(ScriptedClient):
    """A client whose server takes connections and says nothing until `answers` is set."""

    def __init__(self, *models: str) -> None:
        super().__init__(lambda request: text("an answer"), models or ("demo",))
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def metadata(self, model: str) -> dict[str, Any]:
        self.asked.set()
        await self.answers.wait()
        return await super().metadata(model)

    async def repository_index(self) -> list[dict[str, Any]]:
        self.asked.set()
        await self.answers.wait()
        return await super().repository_index()


_TOO_MANY = r"1 requests wait for Triton .*max_open_requests=1\)"


@pytest.mark.parametrize("name", ["demo", None])
async def test_no_more_requests_wait_for_a_server_than_can_be_open(name: str | None) -> None:
    """From their first question on, which can last as long as a connection takes to fail."""
    client = NoAnswer()
    upstream = Upstream(GatewayOptions(max_open_requests=1), client)
    first = asyncio.create_task(upstream.resolve(name))
    await client.asked.wait()
    for other in ("demo", "another", None):
        with pytest.raises(APIError, match=_TOO_MANY) as caught:
            await asyncio.wait_for(upstream.resolve(other), 20)
        error = caught.value  # as of one that cannot be reached: a proxy asks another gateway
        assert (error.status, error.code, error.retry_after) == (503, "upstream_unreachable", 1.0)
    client.answers.set()
    assert (await first).name == (await upstream.resolve("demo")).name == "demo"
    client.answers.clear()
    client.asked.clear()
    other = asyncio.create_task(upstream.resolve("another"))
    await client.asked.wait()
    assert (await asyncio.wait_for(upstream.resolve("demo"), 20)).name == "demo", "a known model is not waited for"
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert upstream.waiting.count == 0


async def test_a_request_that_waits_for_another_attempt_counts_until_its_end() -> None:
    client, tried = ScriptedClient(lambda request: text("an answer")), asyncio.Queue[int]()
    metadata = client.metadata

    async def unreachable(model: str) -> Any:
        tried.put_nowait(upstream.waiting.count)
        if tried.qsize() < 3:
            raise ServerUnreachableError("cannot reach 127.0.0.1:1")
        return await metadata(model)

    client.metadata = unreachable  # type: ignore[method-assign]
    upstream = Upstream(GatewayOptions(), client)
    assert (await upstream.resolve("demo")).name == "demo"
    assert [tried.get_nowait() for _ in range(3)] == [1, 1, 1] and upstream.waiting.count == 0


class Groups:
    """Tritons of `qwen`, of `llama` and of all others; they say nothing, and one request can wait for each."""

    def __init__(self) -> None:
        options = GatewayOptions(max_open_requests=1)
        self.clients = {one: NoAnswer(one) for one in ("qwen", "llama", "others")}
        each = {one: Upstream(options, client) for one, client in self.clients.items()}
        self.waiting = WaitingRequests(1)
        self.both = ModelUpstreams({one: each[one] for one in ("qwen", "llama")}, each["others"], self.waiting)
        self.counts = [self.waiting, *(one.waiting for one in each.values())]

    async def resolve(self, name: str | None) -> str:
        return (await asyncio.wait_for(self.both.resolve(name), 20)).name

    async def waits(self, name: str | None, *asked: str) -> asyncio.Task[str]:
        """A request for a model, after these Tritons were asked about it."""
        task = asyncio.create_task(self.resolve(name))
        for one in asked:
            await self.clients[one].asked.wait()
        return task

    async def is_refused(self, name: str | None) -> None:
        with pytest.raises(APIError, match=_TOO_MANY):
            await self.resolve(name)


async def test_requests_that_wait_for_one_model_leave_the_others() -> None:
    groups = Groups()
    for name in ("llama", "others"):
        groups.clients[name].answers.set()
    for _ in range(2):
        first = await groups.waits("qwen", "qwen")
        await groups.is_refused("qwen")
        for _ in range(2):  # anew, and from what is remembered
            assert [await groups.resolve(name) for name in ("llama", "others")] == ["llama", "others"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        groups.clients["qwen"].asked.clear()
    assert [one.count for one in groups.counts] == [0] * 4


@pytest.mark.parametrize("name", ["an adapter", None])
async def test_questions_that_all_must_answer_have_a_count_of_their_own(name: str | None) -> None:
    groups = Groups()
    for one in ("llama", "others"):
        groups.clients[one].answers.set()
    first = await groups.waits(name, "qwen")
    for other in ("another adapter", None):
        await groups.is_refused(other)
    groups.both._all[-1]._known.clear()  # as after some time
    for other in ("llama", "others"):
        assert await groups.resolve(other) == other
    groups.clients["qwen"].answers.set()
    with pytest.raises(APIError, match="does not exist" if name else "models here: qwen, llama, others"):
        await first
    assert [one.count for one in groups.counts] == [0] * 4


async def test_a_known_model_is_served_while_others_wait_for_the_same_tritons() -> None:
    groups = Groups()
    for client in groups.clients.values():
        client.answers.set()
    assert await groups.resolve("others") == "others"
    groups.both.forget()  # as a request for an unknown name does
    client = groups.clients["others"]
    client.answers.clear()
    client.asked.clear()
    first = await groups.waits("new", "others")
    await groups.is_refused("newer")
    assert await groups.resolve("others") == "others"
    client.answers.set()
    with pytest.raises(APIError, match="does not exist"):
        await first
