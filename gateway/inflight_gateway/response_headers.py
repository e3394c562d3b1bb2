"""Headers of any response: `X-Request-Id`, and `X-Inflight-Warning` if a request was not done as it asked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["REQUEST_ID", "WARNING", "Reason", "ResponseHeaders", "Warnings", "new_request_id", "warn", "warnings_of"]

WARNING = "x-inflight-warning"
Reason = Literal["unknown_key", "ignored", "max_tokens"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")

_MAX_WARNINGS, _MAX_CHARACTERS = 8, 300  # proxies limit the size of headers


@dataclass(frozen=True)
class Warnings:
    """Warnings of one response; a body can give reason for as many as it has values.

    Attributes:
        shown: the first messages.
        counts: of all warnings, by reason.
    """

    shown: list[str] = field(default_factory=list)
    counts: dict[Reason, int] = field(default_factory=dict)


def warn(scope: Scope, reason: Reason, message: str) -> None:
    """Tell the caller, in the header of the response, that something was not done as requested.

    Args:
        scope: of the request, whose response has not begun.
        reason: a label of the metric.
        message: any text.
    """
    if (warnings := scope.get("inflight_warnings")) is None:
        warnings = scope["inflight_warnings"] = Warnings()
    warnings.counts[reason] = warnings.counts.get(reason, 0) + 1
    if len(warnings.shown) < _MAX_WARNINGS:
        warnings.shown.append(message[:_MAX_CHARACTERS])


def warnings_of(scope: Scope) -> Warnings:
    """The warnings so far."""
    found: Warnings = scope.get("inflight_warnings") or Warnings()
    return found


def _warning_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    warnings = warnings_of(scope)
    if not warnings.shown:
        return []
    shown, more = list(warnings.shown), sum(warnings.counts.values()) - len(warnings.shown)
    if more:
        shown.append(f"and {more} more")
    text = "; ".join(shown).encode("ascii", "backslashreplace")
    return [(WARNING.encode(), _CONTROL.sub(b" ", text))]


def new_request_id() -> str:
    """A random id."""
    return os.urandom(16).hex()


class ResponseHeaders:
    """The outermost ASGI middleware.  It sets `scope["request_id"]`, and adds both headers when the response begins.

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
                own = (b"x-request-id", scope["request_id"].encode())
                message["headers"] = [*message["headers"], own, *_warning_header(scope)]
            await send(message)

        await self._app(scope, receive, sending)
