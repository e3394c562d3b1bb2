"""Arbitrary requests against a scripted backend: no answer is an error of the server."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import httpx
from anthropic_bodies import anthropic_bodies, check_anthropic_answer
from hostile_bodies import bodies, check_answer, encoded
from hypothesis import given
from hypothesis import strategies as st
from scripted_client import ScriptedClient, text, vectors

from inflight_gateway.app import build_app
from inflight_gateway.gateway import Gateway
from inflight_gateway.options import GatewayOptions
from inflight_gateway.tool_parsers import FORMATS
from inflight_gateway.upstream import Upstream

_POSTS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"),
    *("/invocations", "/api/chat", "/api/generate", "/api/show"),
    *("/v1/embeddings", "/v1/score", "/v2/rerank", "/classify"),
]
_ANTHROPICS = ["/v1/messages", "/v1/messages/count_tokens"]
_CALL = '<think>a</think><tool_call>\n{"name": "f", "arguments": {"a": true}}\n</tool_call>[f(a=1)]'


def answer(method: str, path: str, content: bytes, tool_format: str = "hermes", opened: bool = False) -> httpx.Response:
    """The response of a new application; `opened`: the chat template has opened the reasoning."""
    client = ScriptedClient(
        lambda request: vectors(request) if request.pooling else text("Hel", "lo", _CALL, n=request.n)
    )
    client.info.update(tool_format=tool_format, reasoning_tags=["<think>", "</think>"], reasoning_opened=opened)
    options = GatewayOptions(max_body_depth=20, max_prompts=4, max_inputs=4, max_n=4)

    async def send() -> httpx.Response:
        app = build_app(options, Gateway(options, Upstream(options, client)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.request(method, path, content=content)

    return asyncio.run(send())


@given(data=st.data(), path=st.sampled_from(_POSTS), tool_format=st.sampled_from(sorted(FORMATS)), opened=st.booleans())
def test_any_json(data: Any, path: str, tool_format: str, opened: bool) -> None:
    check_answer(answer("POST", path, encoded(data.draw(bodies(path))), tool_format, opened))


@given(
    data=st.data(),
    path=st.sampled_from(_ANTHROPICS),
    tool_format=st.sampled_from(sorted(FORMATS)),
    opened=st.booleans(),
)
def test_any_json_of_anthropics_api(data: Any, path: str, tool_format: str, opened: bool) -> None:
    check_anthropic_answer(answer("POST", path, encoded(data.draw(anthropic_bodies())), tool_format, opened))


@given(content=st.binary(max_size=30), path=st.sampled_from(_ANTHROPICS))
def test_any_bytes_to_anthropics_api(content: bytes, path: str) -> None:
    check_anthropic_answer(answer("POST", path, content))


@given(content=st.binary(max_size=30), path=st.sampled_from(_POSTS))
def test_any_bytes(content: bytes, path: str) -> None:
    check_answer(answer("POST", path, content))


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    path=st.sampled_from(["/v1/models/", "/v1/", "/", "/api/"]).flatmap(
        lambda start: st.text(st.characters(codec="utf-8"), max_size=12).map(lambda rest: start + rest)
    ),
)
def test_any_path(method: str, path: str) -> None:
    found = answer(method, quote(path), b"")
    assert found.status_code < 500
    if found.status_code >= 400:
        error = found.json()["error"]
        assert isinstance(error, str) or set(error) == {"message", "type", "param", "code"}


def test_nesting_beyond_the_limits() -> None:
    for content in (b"[" * 100_000, b'{"prompt":' + b"[" * 30 + b"]" * 30 + b"}", b'{"a":' * 5000):
        check_answer(answer("POST", "/v1/completions", content))
