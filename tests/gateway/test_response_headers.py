"""Headers of responses that no endpoint sets: the request's id, on every response."""

from __future__ import annotations

import asyncio

import pytest
from scripted_client import text

ORIGIN = {"Origin": "https://page.example"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST"}
BODY = {"prompt": "a"}
KEY = {"Authorization": "Bearer key"}


def ok(request):
    return text("a")


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/v1/models", {}, 401),
        ("GET", "/health", {}, 200),
        ("GET", "/v1/models", {"headers": KEY}, 200),
        ("GET", "/nothing", {"headers": KEY}, 404),
        ("DELETE", "/v1/models", {"headers": KEY}, 405),
        ("GET", "/v1/models/nothing", {"headers": KEY}, 404),
        ("OPTIONS", "/v1/completions", {"headers": PREFLIGHT}, 200),
        ("POST", "/v1/completions", {"headers": KEY, "content": b"{"}, 400),
        ("POST", "/v1/completions", {"headers": KEY, "content": b"x" * 2000}, 413),
        ("POST", "/v1/completions", {"headers": KEY, "json": {**BODY, "model": "nothing"}}, 404),
        ("POST", "/v1/completions", {"headers": KEY, "json": {**BODY, "stream": True}}, 200),
        ("POST", "/v1/completions", {"headers": KEY, "json": BODY}, 200),
    ],
)
async def test_every_response_has_a_request_id(start, method, path, options, status):
    front = await start(ok, api_keys=("key",), cors_origins=("https://page.example",), max_body_bytes=1000)
    response = await front.http.request(method, path, **options)
    assert response.status_code == status and len(response.headers.get_list("x-request-id")) == 1
    assert len(response.headers["x-request-id"]) == 32
    given = {**options.get("headers", {}), "X-Request-Id": "my-id"}
    again = await front.http.request(method, path, **{**options, "headers": given})
    assert again.headers["x-request-id"] == "my-id"


async def test_an_id_that_is_not_valid_is_replaced(start):
    front = await start(ok)
    for bad in (b"a b", b"\xff", b"x" * 129, b""):
        response = await front.http.get("/health", headers=[(b"X-Request-Id", bad)])
        assert len(response.headers["x-request-id"]) == 32


async def test_a_fault_of_the_gateway_has_an_id_and_can_be_read_by_a_page(start, monkeypatch):
    front = await start(ok, cors_origins=("https://page.example",))

    async def broken(name):
        raise KeyError("a secret of the gateway")

    monkeypatch.setattr(front.gateway.upstream, "resolve", broken)
    response = await front.post("/v1/completions", BODY, headers={**ORIGIN, "X-Request-Id": "my-id"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "my-id")
    assert response.json()["error"]["code"] == "internal_error" and "secret" not in response.text
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    shown = (await front.http.get("/metrics")).text
    assert 'inflight_gateway_requests_total{endpoint="/v1/completions",status="500"} 1.0' in shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/completions", {"prompt": "a"}, "max_tokens"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_completion_tokens"),
        ("/v1/responses", {"input": "a"}, "max_output_tokens"),
    ],
)
async def test_a_limit_beyond_the_context_is_named(start, path, body, key, stream):
    front = await start(lambda request: text("a", n=request.n))  # the prompt has 3 tokens, the context 2048
    for tokens, warning in [
        (2045, None),
        (2046, f"{key}: 2046 came; the context of 2048 tokens has room for 2045 after a prompt of 3"),
    ]:
        response = await front.post(path, {**body, key: tokens, "stream": stream})
        assert response.status_code == 200 and response.headers.get("x-inflight-warning") == warning
    assert "x-inflight-warning" not in (await front.post(path, {**body, "stream": stream})).headers
    shown = (await front.http.get("/metrics")).text
    assert f'inflight_gateway_warnings_total{{endpoint="{path}",reason="max_tokens"}} 1.0' in shown


async def test_a_limit_is_named_before_the_prompts_length_is_known(start):
    held = asyncio.Event()
    front = await start(lambda request: [held, *text("a")], keep_alive_seconds=0.01)
    for tokens in (2047, 2048):
        held.clear()
        sent = front.http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": tokens, "stream": True})
        async with sent as response:
            warning = response.headers.get("x-inflight-warning", "")
            assert warning.endswith("has room for 2047 after the prompt") == (tokens == 2048)
            held.set()
            await response.aread()
