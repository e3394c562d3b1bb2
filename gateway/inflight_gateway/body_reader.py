"""The bytes of a request's body: from where they may come, how many, and how long they may take."""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlsplit

from starlette.requests import Request

from inflight_gateway.connections import BODY_ARRIVED
from inflight_gateway.errors import APIError
from inflight_gateway.options import GatewayOptions

__all__ = ["BodyReader"]

_SMALL = 64 * 1024  # bytes of a body that do not count: as many wait in a connection's buffer anyway


class BodyReader:
    """Reads bodies, all of them together within `max_bodies_bytes`.

    The rest of a refused body is received and discarded: a client that still sends would lose the answer if the
    connection was closed.

    Args:
        options: limits.

    Attributes:
        held: bytes of bodies that are being read.
    """

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self.held = 0

    async def read(self, http: Request) -> bytes:
        """The body of a request.

        Raises:
            APIError: 408 after `body_timeout`, 413 beyond `max_body_bytes`, 415 for a form of a foreign page, 503 if
                there are too many bytes of bodies.
        """
        self._check_site(http)
        self._check_declared(http)
        try:
            if BODY_ARRIVED in http.scope:  # nothing to wait for
                return await self._collect(http)
            if sys.version_info < (3, 11):
                return await asyncio.wait_for(self._collect(http), self._options.body_timeout)
            async with asyncio.timeout(self._options.body_timeout):  # without a task of its own
                return await self._collect(http)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {self._options.body_timeout:g} s (body_timeout)"
            raise APIError(408, message, code="body_timeout", headers={"Connection": "close"}) from None

    def _check_site(self, http: Request) -> None:
        """Refuse what a page can send to any server without asking: browsers ask before they send JSON."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json" or kind.endswith("+json"):
            return
        origin = http.headers.get("origin")
        allowed = self._options.cors_origins
        if origin is None:
            foreign = http.headers.get("sec-fetch-site") == "cross-site"
        else:
            same = urlsplit(origin).netloc == http.headers.get("host")
            foreign = not same and origin not in allowed and "*" not in allowed
        if foreign:
            message = (
                f"content type {kind[:100]!r} came from a page of {(origin or 'another site')[:200]}; "
                "send application/json, and start the gateway with --allowed-origin for that page"
            )
            raise APIError(415, message, code="unsupported_content_type")

    def _check_declared(self, http: Request) -> None:
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._options.max_body_bytes:
            raise self._too_large()

    async def _collect(self, http: Request) -> bytes:
        body, counted = bytearray(), 0
        try:
            async for part in http.stream():
                body += part
                if len(body) > self._options.max_body_bytes:
                    raise self._too_large()
                grown = max(0, len(body) - _SMALL) - counted
                if grown and self.held + grown > self._options.max_bodies_bytes:
                    message = (
                        f"bodies of {self.held} bytes are arriving, as many as this gateway takes; try again later"
                    )
                    raise APIError(503, message, code="bodies_full", retry_after=1.0)
                counted += grown
                self.held += grown
            return bytes(body)
        finally:
            self.held -= counted

    def _too_large(self) -> APIError:
        limit = self._options.max_body_bytes
        message = f"the body has more than {limit} bytes; at most {limit} are allowed (max_body_bytes)"
        return APIError(413, message)
