"""Clients that write the bytes of HTTP themselves, to a gateway on a port."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

__all__ = ["BODY", "HEAD", "LONG", "answer", "connect", "request"]

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"prompt": "a"}'
LONG = 60.0  # seconds


async def connect(front: Any, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which this has arrived before the gateway's first timer starts, however busy the machine is."""
    client = socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])))
    client.sendall(sent)
    return await asyncio.open_connection(sock=client)


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"}}")


def request(stream: bool, head: str = "") -> bytes:
    body = b'{"prompt": "slow", "stream": %b}' % (b"true" if stream else b"false")
    return f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
