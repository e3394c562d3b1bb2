"""The models in Ollama's form: `/api/tags`, `/api/ps`, `/api/show`; `/api/version`, and what operators do."""

from __future__ import annotations

import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from inflight_gateway.bodies import read_body
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.gateway import gateway_of
from inflight_gateway.health import package_version
from inflight_gateway.ollama import ollama_model
from inflight_gateway.ollama_input import OllamaShowBody
from inflight_gateway.sse import encode_json
from inflight_gateway.upstream import ServedModel

__all__ = [
    "API_VERSION",
    "ollama_absent",
    "ollama_error",
    "ollama_ps",
    "ollama_show",
    "ollama_tags",
    "ollama_version",
]

API_VERSION = "0.12.11"  # of Ollama: clients refuse older ones
_FOREVER = "9999-12-31T23:59:59Z"  # models stay loaded
_FAMILY = "inflight"
_MANAGED = ("blobs", "copy", "create", "delete", "pull", "push")


async def ollama_version(http: Request) -> Response:
    """`{"version": ...}` of Ollama's API, and Inflight's own."""
    return _json({"version": API_VERSION, "inflight": package_version()})


async def ollama_tags(http: Request) -> Response:
    """The models that are ready."""
    models = await gateway_of(http).upstream.models()
    return _json({"models": [_entry(model) for model in models]})


async def ollama_ps(http: Request) -> Response:
    """The same models: each is loaded, and stays so."""
    models = await gateway_of(http).upstream.models()
    loaded = [
        {
            **_entry(model),
            "expires_at": _FOREVER,
            "size_vram": 0,
            "context_length": model.info.get("max_model_len", 0),
        }
        for model in models
    ]
    return _json({"models": loaded})


async def ollama_show(http: Request) -> Response:
    """Facts about one model.  The template is shown if `/tokenizer_info` may show it."""
    gateway = gateway_of(http)
    body = await read_body(http, OllamaShowBody, gateway)
    name = body.model or body.name
    if not name:
        raise invalid("model is missing; it is required", "model", "missing_required_parameter")
    model = await ollama_model(gateway, name)
    template = ""
    if gateway.options.enable_tokenizer_info_endpoint and model.is_inflight:
        template = (await gateway.upstream.tokenizer_info(model)).get("chat_template") or ""
    info: dict[str, Any] = {"general.architecture": _FAMILY, "general.basename": model.name}
    if "max_model_len" in model.info:
        info[f"{_FAMILY}.context_length"] = model.info["max_model_len"]
    return _json(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": _details(),
            "model_info": info,
            "capabilities": _capabilities(model, gateway.options.fim_template),
            "modified_at": _since(model),
        }
    )


def ollama_error(error: APIError, scope: Scope) -> Response:
    """An error in Ollama's form."""
    return Response(encode_json({"error": error.message}), error.status, error.headers, "application/json")


async def ollama_absent(http: Request) -> Response:
    """An operation of Ollama's that a client cannot do here."""
    path = http.url.path
    http.scope["error_form"] = ollama_error
    if path.removeprefix("/api/").partition("/")[0] in _MANAGED:
        message = f"{path}: the operator of this server loads its models; /api/tags lists them"
    else:
        message = f"{path} is not supported: this server generates and embeds text; /docs lists what it has"
    raise APIError(404, message, code="unsupported_endpoint")


def _capabilities(model: ServedModel, fim_template: str) -> list[str]:
    if not model.info.get("generates", True):
        return ["embedding"] if "embed" in model.info.get("pooling_tasks", ()) else []
    found = ["completion"]
    if "messages" in model.inputs and model.info.get("has_chat_template", True):
        found.append("tools")  # with any template
    if model.info.get("reasoning_tags"):
        found.append("thinking")
    if fim_template != "none" and (fim_template or model.info.get("fim_template")):
        found.append("insert")
    return found


def _entry(model: ServedModel) -> dict[str, Any]:
    """A model in a list.  Sizes are not known here."""
    return {
        "name": f"{model.name}:latest",
        "model": f"{model.name}:latest",
        "modified_at": _since(model),
        "size": 0,
        "digest": model.info.get("checkpoint_id") or "",
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": "",
        "quantization_level": "",
    }


def _since(model: ServedModel) -> str:
    return datetime.datetime.fromtimestamp(model.since, datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def _json(value: dict[str, Any]) -> Response:
    return Response(encode_json(value), media_type="application/json")
