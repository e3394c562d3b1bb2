"""`/v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.gateway import gateway_of
from inflight_gateway.sse import encode_json
from inflight_gateway.upstream import ServedModel, adapter_ids

__all__ = ["list_models", "retrieve_model"]

# Keys of OpenAI's API until 2023, which clients of vLLM still read.
_PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


async def list_models(http: Request) -> Response:
    """The models that take text and are ready, each followed by its adapters."""
    models = await gateway_of(http).upstream.models()
    body = {"object": "list", "data": [_card(*one) for one in adapter_ids(models)]}
    return Response(encode_json(body), media_type="application/json")


async def retrieve_model(http: Request) -> Response:
    """One of them."""
    model = await gateway_of(http).upstream.find(http.path_params["model"])
    return Response(encode_json(_card(model, model.adapter, model.id)), media_type="application/json")


def _card(model: ServedModel, adapter: str | None, id: str) -> dict[str, Any]:
    """The model in vLLM's form.  `root` is the name, too: the operator's paths are not for callers."""
    card: dict[str, Any] = {
        "id": id,
        "object": "model",
        "created": model.since,
        "owned_by": "inflight",
        "root": adapter or model.name,
        "parent": None if adapter is None else model.name,
        "permission": [{"id": f"modelperm-{id}", "created": model.since, **_PERMISSION}],
    }
    if "max_model_len" in model.info:
        card["max_model_len"] = model.info["max_model_len"]
    return card
