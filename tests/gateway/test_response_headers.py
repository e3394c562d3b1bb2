"""Headers of responses that no endpoint sets: the request's id, on every response."""

from __future__ import annotations

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
