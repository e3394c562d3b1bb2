"""POST endpoints are answered past the framework, everything else by it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from inflight_gateway.direct_routes import DirectRoutes


class Refused(Exception):
    pass


class Special(Refused):
    pass


def outcome(path: str, method: str = "POST", kind: str = "http") -> str:
    """The body that a request gets."""
    sent: list[dict[str, Any]] = []

    async def framework(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"framework"})

    async def answers(http: Request) -> Response:
        return PlainTextResponse(f"answered {http.url.path}")

    async def refuses(http: Request) -> Response:
        raise Special("this")

    async def breaks(http: Request) -> Response:
        raise KeyError("that")

    async def refusal(http: Request, error: Exception) -> Response:
        return PlainTextResponse(f"refused {error}")

    async def leaves(http: Request, error: Exception) -> Response:
        return PlainTextResponse("gone")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    routes = {"/answers": answers, "/refuses": refuses, "/breaks": breaks}
    app = DirectRoutes(framework, routes, {ClientDisconnect: leaves, Refused: refusal})
    scope = {"type": kind, "path": path, "method": method, "headers": [], "query_string": b"", "server": ("host", 80)}
    asyncio.run(app(scope, receive, send))
    return b"".join(message.get("body", b"") for message in sent).decode()


def test_a_post_of_a_known_path_is_answered_and_a_refusal_has_its_form() -> None:
    assert outcome("/answers") == "answered /answers"
    assert outcome("/refuses") == "refused this"


def test_another_exception_is_raised() -> None:
    with pytest.raises(KeyError, match="that"):
        outcome("/breaks")


@pytest.mark.parametrize(("path", "method"), [("/answers", "GET"), ("/answers/", "POST"), ("/", "POST")])
def test_the_framework_answers_the_rest(path: str, method: str) -> None:
    assert outcome(path, method) == "framework"


def test_the_framework_gets_what_is_not_http() -> None:
    assert outcome("/answers", kind="lifespan") == "framework"
