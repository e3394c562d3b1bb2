"""The outermost middleware: every response has the header `X-Request-Id`."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["REQUEST_ID", "ResponseHeaders", "new_request_id"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")


def new_request_id() -> str:
    """A random id."""
    return uuid.uuid4().hex


class ResponseHeaders:
    """ASGI middleware.  It sets `scope["request_id"]`, and sends its value when the response begins.

    The id is that of the header `X-Request-Id` if it is valid, else a random one; an endpoint can set another.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope["request_id"] = given if REQUEST_ID.fullmatch(given) else new_request_id()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", scope["request_id"].encode())]
            await send(message)

        await self._app(scope, receive, sending)
