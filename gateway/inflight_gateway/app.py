"""The application: which path is answered by which function."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inflight_gateway.completions import completions
from inflight_gateway.errors import APIError
from inflight_gateway.gateway import Gateway
from inflight_gateway.generation import ClientGone
from inflight_gateway.health import health, ready, version
from inflight_gateway.models import list_models, retrieve_model
from inflight_gateway.options import GatewayOptions

__all__ = ["build_app"]

# An endpoint is an async function from Request to Response, in a file of its own.
_ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
]


def build_app(options: GatewayOptions, gateway: Gateway | None = None) -> Starlette:
    """The ASGI application.

    Args:
        options: of the operator.
        gateway: takes the place of a new one, in tests.
    """
    shared = gateway or Gateway(options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await shared.upstream.close()

    app = Starlette(
        routes=_ROUTES,
        lifespan=lifespan,
        exception_handlers={APIError: _failed, HTTPException: _refused, ClientGone: _gone, Exception: _broken},
    )
    app.state.gateway = shared
    return app


def error_response(error: APIError) -> Response:
    """The response of a request that fails before anything was sent."""
    return Response(error.to_json(), error.status, error.headers, "application/json")


async def _failed(http: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_response(error)


async def _refused(http: Request, error: Exception) -> Response:
    """Starlette's own errors: no such path, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(APIError(error.status_code, message, code=code, headers=dict(error.headers or {})))


async def _gone(http: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the access log shows it, as nginx does


async def _broken(http: Request, error: Exception) -> Response:
    return error_response(APIError(500, "internal error of the gateway; see its log", code="internal_error"))
