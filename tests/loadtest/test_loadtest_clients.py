"""The load's OpenAI client, on servers that know more or fewer of its keys, and that fail."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai_server import serving_openai

from loadtest.clients import connect, find_kind
from loadtest.errors import LoadTestError
from loadtest.exchange import Exchange, Failure, TimedClient
from loadtest.openai_client import OpenAIClient
from loadtest.options import LoadOptions
from loadtest.targets import sole_model


def _checked(url: str, **options: Any) -> OpenAIClient:
    client = connect("openai", url, "demo", **options)
    client.check()
    assert isinstance(client, OpenAIClient)
    return client


def _sent(url: str, tokens: int = 6) -> Exchange:
    client = _checked(url)
    return client.send([1, 2, 3] if client.takes_ids else "one two three", tokens)


def _counts(exchange: Exchange) -> list[int]:
    return [count for _, count in exchange.arrivals]


def test_usage_with_each_response_counts_its_tokens() -> None:
    with serving_openai(tokens_per_event=4) as server:
        exchange = _sent(server.url)
    assert (_counts(exchange), exchange.counted, exchange.error) == ([4, 2], "server", None)


@pytest.mark.parametrize(("usage", "counts"), [("each", [1] * 6), ("end", [2, 1, 1, 1, 1]), ("none", [1] * 5)])
def test_a_first_token_without_text_is_counted_if_the_server_says_so(usage: str, counts: list[int]) -> None:
    with serving_openai(hides_first=True, usage=usage) as server:
        exchange = _sent(server.url)
    assert (_counts(exchange), exchange.error) == (counts, None)


def test_usage_at_the_end_is_spread_over_the_responses() -> None:
    """Also if there are fewer tokens than responses: some texts take no new token."""
    with serving_openai(usage="end", tokens_per_event=4) as server:
        exchange = _sent(server.url)
    assert (_counts(exchange), exchange.counted, exchange.error) == ([3, 3], "usage", None)
    exchange = Exchange(0.0, [(0.1, 1), (0.2, 1), (0.3, 1)])
    exchange.count_as(2)
    assert exchange.arrivals == [(0.1, 1), (0.2, 1)]


def test_without_usage_a_response_with_text_is_a_token() -> None:
    with serving_openai(usage="none", tokens_per_event=4) as server:
        exchange = _sent(server.url)
    assert (_counts(exchange), exchange.counted, exchange.error) == ([1, 1], "chunks", None)


def test_a_model_that_ends_early_answers_in_full() -> None:
    with serving_openai(tokens=4) as server:
        exchange = _sent(server.url)
    assert (exchange.tokens, exchange.ended_early, exchange.error) == (4, True, None)


@pytest.mark.parametrize("refused", ["ignore_eos", "continuous_usage_stats", "stream_options", "max_tokens"])
def test_refused_keys_are_left_out(refused: str) -> None:
    with serving_openai(refused=(refused,), usage="end") as server:
        exchange = _sent(server.url)
        body = server.bodies[-1]
    assert exchange.error is None and exchange.tokens == 6
    assert refused not in body and refused not in body.get("stream_options", {})
    kept = {"ignore_eos", "temperature", "max_tokens"} - {refused}
    assert kept <= set(body) and ("max_completion_tokens" in body) == (refused == "max_tokens")


def test_a_server_with_chats_alone_gets_words() -> None:
    with serving_openai(chat_only=True, refused=("ignore_eos", "max_tokens", "temperature"), tokens=5) as server:
        exchange = _sent(server.url, tokens=9)
        assert server.bodies[-1]["messages"] == [{"role": "user", "content": "one two three"}]
    assert (exchange.tokens, exchange.error, exchange.ended_early) == (5, None, True)


def test_a_server_with_text_alone_gets_words() -> None:
    with serving_openai(text_only=True) as server:
        assert not _checked(server.url).takes_ids


def test_traits_of_a_checked_client_need_no_other_check() -> None:
    with serving_openai(refused=("ignore_eos",)) as server:
        traits = json.loads(json.dumps(_checked(server.url).traits))
        before = len(server.bodies)
        assert connect("openai", server.url, "demo", traits=traits).send([1], 3).error is None
        assert len(server.bodies) == before + 1


def test_failures_have_a_name() -> None:
    with serving_openai() as server:
        client = _checked(server.url)
        server.statuses = [429, 404, "cut", 500]
        failures = [client.send([1, 2], 6) for _ in range(4)]
    names = [exchange.failure for exchange in failures]
    assert names == ["HTTP 429", "HTTP 404", "the stream ended without [DONE]", "HTTP 500"]
    assert failures[0].error == 'HTTP 429: {"error": {"message": "as the test says"}}'
    assert failures[2].tokens == 3
    assert client.send([1], 6).failure == "connection refused"


@pytest.mark.parametrize(
    "event",
    ["[]", "nonsense", '{"choices": 3}', '{"choices": [], "usage": {"completion_tokens": "x"}}', '{"error": "why"}'],
)
def test_events_of_any_form_fail_only_their_request(event: str) -> None:
    with serving_openai() as server:
        client = _checked(server.url)
        broken = b"data: " + event.encode() + b"\n\n"
        with socket.create_server(("127.0.0.1", 0)) as raw:
            client._netloc = f"127.0.0.1:{raw.getsockname()[1]}"

            def answer() -> None:
                connection, _ = raw.accept()
                connection.recv(65536)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + broken)
                connection.close()

            thread = threading.Thread(target=answer)
            thread.start()
            exchange = client.send([1], 4)
            thread.join()
    assert exchange.failure in (
        "an event is not a JSON object",
        "an event of an unknown form",
        "an error in the stream",
    )


def test_an_adapter_is_asked_for_as_a_model() -> None:
    with serving_openai(adapters=("doll", "sheep")) as server:
        client = _checked(server.url)
        assert client.models() == ["demo"] and sole_model(client, server.url) == "demo"
        assert client.send([1], 3, "sheep").error is None and client.send([1], 3).error is None
        assert [body["model"] for body in server.bodies[-2:]] == ["sheep", "demo"]
        load = LoadOptions(scenario="uniform", adapters="doll,sheep,")
        assert load.checked(client, "demo") == load
        assert [body["model"] for body in server.bodies[-3:]] == ["demo", "doll", "sheep"]
        with pytest.raises(LoadTestError, match=r"demo refuses adapter 'llama' \(HTTP 404.*; load it there"):
            LoadOptions(scenario="uniform", adapters="doll,llama").checked(client, "demo")
        adapter = connect("openai", server.url, "doll")
        adapter.check()
        assert adapter.send([1], 3).error is None


def test_an_adapter_of_another_model_is_refused() -> None:
    with serving_openai(models=("other", "demo"), adapters=("doll",)) as server:
        with pytest.raises(LoadTestError, match="'doll' is an adapter of 'other', not of 'demo'"):
            LoadOptions(scenario="uniform", adapters="doll").checked(_checked(server.url), "demo")
        client = connect("openai", server.url, "other")
        assert LoadOptions(scenario="uniform", adapters="doll").checked(client, "other").adapters == "doll"


@pytest.mark.parametrize(
    ("error", "is_unknown"),
    [
        ("LoRA llama is not supported, we currently support ['doll']", True),
        ("LoRA feature is not enabled.", False),
        ("HTTP 503: the queue is full", False),
    ],
)
def test_loading_an_adapter_is_advised_only_if_it_is_unknown(error: str, is_unknown: bool) -> None:
    class Refuses(TimedClient):
        def check(self) -> None: ...

        def _responses(self, prompt: Any, max_tokens: int, adapter: str, exchange: Exchange) -> Iterator[int]:
            if adapter:
                raise Failure(error)
            yield 1

    with pytest.raises(LoadTestError, match="refuses adapter 'llama'") as found:
        LoadOptions(scenario="uniform", adapters="llama").checked(Refuses(), "demo")
    assert str(found.value).endswith("load it there") == is_unknown


def test_a_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving_openai(key="secret") as server:
        with pytest.raises(LoadTestError, match="asks for an API key; set the environment variable OPENAI_API_KEY"):
            _checked(server.url)
        with pytest.raises(LoadTestError, match=r"refuses the API key \(401\)"):
            _checked(server.url, api_key="wrong")
        assert _checked(server.url, api_key="secret").send([1], 2).error is None
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        _checked(server.url)
        with pytest.raises(LoadTestError, match="model 'other' is not ready"):
            connect("openai", server.url, "other").check()
        server.statuses = [429]
        with pytest.raises(LoadTestError, match="answers a request to demo with HTTP 429"):
            _checked(server.url)
        server.refused = ("model",)
        with pytest.raises(LoadTestError, match=r"refuses streams of demo: HTTP 400: .*model"):
            _checked(server.url)


def test_a_server_is_asked_what_it_speaks() -> None:
    with serving_openai() as server:
        assert find_kind(server.url)[0] == "openai"
        address = server.url.removeprefix("http://")
        assert find_kind(address) == ("openai", address)
        assert _checked(address).models() == ["demo"]
        assert _checked(server.url + "/v1/").models() == ["demo"]
    for url, said in [(address, "start a server there or correct --url"), ("http://", "url=")]:
        with pytest.raises(LoadTestError, match=said):
            find_kind(url)
    with pytest.raises(LoadTestError, match="--kind 'vllm': must be one of grpc, http, openai"):
        find_kind(address, "vllm")
    with pytest.raises(LoadTestError, match="give host:port, or a URL"):
        connect("openai", "ftp://host", "demo")
