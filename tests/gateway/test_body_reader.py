"""Bodies that are too large, too many, or from a page of another site."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_client import text

BODY = b'{"prompt": "a"}'
MIB = 1024 * 1024


def ok(request):
    return text("a")


async def connection(front: Any, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent the head of a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n".encode())
    return reader, writer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # no browser
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({"Content-Type": "text/plain", "Origin": "https://evil.example"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded", "Origin": "null"}, 415),
        ({"Origin": "https://evil.example"}, 415),
        ({"Content-Type": "text/plain", "Sec-Fetch-Site": "cross-site"}, 415),
        ({"Content-Type": "text/plain", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "text/plain", "Origin": "http://gateway:9000", "Host": "gateway:9000"}, 200),
        ({"Content-Type": "text/plain", "Origin": "http://gateway:9001", "Host": "gateway:9000"}, 415),
        ({"Content-Type": "text/plain", "Origin": "https://page.example"}, 200),
        ({"Content-Type": "application/json; charset=utf-8", "Origin": "https://evil.example"}, 200),  # was preflighted
    ],
)
async def test_forms_of_foreign_pages_are_refused(start, headers, status):
    front = await start(ok, cors_origins=("https://page.example",))
    response = await front.http.post("/v1/completions", content=BODY, headers=headers)
    assert response.status_code == status, response.text
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_content_type" and not front.client.requests


async def test_a_declared_length_over_the_limit_is_refused_at_once(start):
    front = await start(ok, max_body_bytes=1000)
    for extra in ("", "\r\nExpect: 100-continue"):
        reader, writer = await connection(front, f"Content-Length: 1001{extra}")
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 413") and b"at most 1000 are allowed" in answer
        writer.close()


async def until_held(front: Any, size: int) -> None:
    while front.gateway.bodies.held != size:
        await asyncio.sleep(0.01)


async def test_half_sent_bodies_take_bounded_memory(start):
    front = await start(ok, max_bodies_bytes=3 * MIB)
    writers = []
    for number in range(3):
        _, writer = await connection(front, f"Content-Length: {2 * MIB}")
        writer.write(b" " * (MIB + 64 * 1024))
        writers.append(writer)
        await until_held(front, (number + 1) * MIB)
    reader, writer = await connection(front, f"Content-Length: {2 * MIB}")
    writer.write(b" " * (64 * 1024 + 1))
    answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 503") and b"bodies_full" in answer and b"retry-after: 1" in answer
    assert (await front.http.post("/v1/completions", content=BODY)).status_code == 200, "small bodies pass"
    for one in [*writers, writer]:
        one.close()
    await until_held(front, 0)
    large = b" " * MIB + BODY
    assert (await front.http.post("/v1/completions", content=large)).status_code == 200
    assert front.gateway.bodies.held == 0


async def test_a_body_that_is_never_sent_ends_its_connection(start):
    front = await start(ok, body_timeout=0.1)
    reader, writer = await connection(front, "Content-Length: 10")
    assert (await reader.read()).startswith(b"HTTP/1.1 408")
    writer.close()
