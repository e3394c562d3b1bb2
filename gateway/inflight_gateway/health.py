"""`/health`, `/ready`, `/load` and `/version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.errors import APIError
from inflight_gateway.gateway import gateway_of
from inflight_gateway.sse import encode_json

__all__ = ["health", "load", "package_version", "ready", "version"]


async def health(http: Request) -> Response:
    """200 while this process answers."""
    return Response()


async def ready(http: Request) -> Response:
    """200 if a model can serve, else 503."""
    if await gateway_of(http).upstream.ready():
        return Response()
    raise APIError(503, "no model is ready", code="not_ready", retry_after=1.0)


async def load(http: Request) -> Response:
    """`{"server_load": ...}`, as vLLM's: the requests that generate now, of all workers together."""
    value = {"server_load": gateway_of(http).metrics.all_open_requests()}
    return Response(encode_json(value), media_type="application/json")


async def version(http: Request) -> Response:
    """`{"version": ...}`, as vLLM's."""
    return Response(encode_json({"version": package_version()}), media_type="application/json")


def package_version() -> str:
    """The installed version of Inflight."""
    try:
        return installed_version("triton-inflight")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
