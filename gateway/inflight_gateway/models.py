"""`/v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

import datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from inflight_gateway.anthropic.errors import anthropic_error
from inflight_gateway.errors import APIError, openai_error
from inflight_gateway.gateway import gateway_of
from inflight_gateway.sse import encode_json
from inflight_gateway.upstream import ServedModel, adapter_ids

__all__ = ["list_models", "models_error", "retrieve_model"]

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


_ANTHROPIC = "anthropic-version"  # a header of its clients


async def list_models(http: Request) -> Response:
    """The models that take text and are ready, each followed by its adapters."""
    models = await gateway_of(http).upstream.models()
    cards = [_card(*one) for one in adapter_ids(models)]
    body: dict[str, Any] = {"object": "list", "data": cards}
    if _ANTHROPIC in http.headers:  # all of them are one page
        ids = [card["id"] for card in cards]
        body = {
            "data": [_anthropic_card(card) for card in cards],
            "has_more": False,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
        }
    return Response(encode_json(body), media_type="application/json")


async def retrieve_model(http: Request) -> Response:
    """One of them."""
    model = await gateway_of(http).upstream.find(http.path_params["model"])
    card = _card(model, model.adapter, model.id)
    if _ANTHROPIC in http.headers:
        card = _anthropic_card(card)
    return Response(encode_json(card), media_type="application/json")


def models_error(error: APIError, scope: Scope) -> Response:
    """An error of both, in the form of the client's API."""
    return (anthropic_error if _ANTHROPIC in Headers(scope=scope) else openai_error)(error, scope)


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


def _anthropic_card(card: dict[str, Any]) -> dict[str, Any]:
    """The same model in Anthropic's form."""
    length = card.get("max_model_len")
    created = datetime.datetime.fromtimestamp(card["created"], datetime.timezone.utc)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }
