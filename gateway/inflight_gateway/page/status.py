"""`/page/status`: what the page shows of models and Tritons."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.errors import APIError
from inflight_gateway.gateway import gateway_of
from inflight_gateway.health import package_version
from inflight_gateway.sse import encode_json

__all__ = ["page_status"]


async def page_status(http: Request) -> Response:
    """Models, Tritons and load, at most a second old.  Neither paths nor processes nor tenants are shown."""
    gateway = gateway_of(http)
    if not gateway.options.page:
        raise APIError(404, "this gateway has no page: it was started with --no-page", code="not_found")
    fleet = await gateway.replicas.fleet()
    models = [
        {
            "id": model.name,
            "max_model_len": model.info.get("max_model_len"),
            "reasoning": model.info.get("reasoning_tags") is not None,
        }
        for model in fleet.models
    ]
    body = {
        "version": package_version(),
        "time": fleet.time,
        "open_requests": gateway.metrics.all_open_requests(),
        "routing": gateway.options.routing,
        "models": models,
        "tritons": fleet.tritons,
        "problem": fleet.problem,
    }
    return Response(encode_json(body), media_type="application/json", headers={"Cache-Control": "no-store"})
