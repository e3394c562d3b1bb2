"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's keys and answers, for the admin key's owner."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from inflight_client import InflightError
from inflight_client.local_servers import ADMIN_HEADER
from inflight_gateway.bodies import Body, read_body
from inflight_gateway.errors import APIError, api_error, invalid
from inflight_gateway.gateway import Gateway, gateway_of
from inflight_gateway.upstream import ServedModel

__all__ = ["LoadAdapterBody", "UnloadAdapterBody", "load_lora_adapter", "unload_lora_adapter"]


class LoadAdapterBody(Body, kw_only=True):
    """`model`: the one that gets the adapter; None: the only one with adapters."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterBody(Body, kw_only=True):
    """`model` as in `LoadAdapterBody`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"lora_int_id": (None,)}

    lora_name: str = ""
    model: str | None = None


async def load_lora_adapter(http: Request) -> Response:
    """Load an adapter into all Tritons of a model."""
    gateway = gateway_of(http)
    check_admin(gateway, http)
    body = await read_body(http, LoadAdapterBody, gateway)
    if not body.lora_name or not body.lora_path:
        raise invalid(
            "Both 'lora_name' and 'lora_path' must be provided.", "lora_name" if body.lora_path else "lora_path"
        )
    model = await _model_of(gateway, body.model)
    parameters: dict[str, str | bool] = {
        "lora_name": body.lora_name,
        "lora_path": body.lora_path,
        "load_inplace": body.load_inplace,
    }
    await _change(gateway, model, "load_adapter", parameters)
    return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(http: Request) -> Response:
    """Unload an adapter from all Tritons of a model; open requests keep it."""
    gateway = gateway_of(http)
    check_admin(gateway, http)
    body = await read_body(http, UnloadAdapterBody, gateway)
    if not body.lora_name:
        raise invalid("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    model = await _model_of(gateway, body.model)
    await _change(gateway, model, "unload_adapter", {"lora_name": body.lora_name})
    return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def check_admin(gateway: Gateway, http: Request) -> None:
    """Raise APIError unless the caller sends the admin key: in a header of its own, or as a bearer token."""
    key = gateway.options.admin_key
    if not key:
        raise APIError(
            403,
            "this gateway has no admin key, so it changes no adapters; start it with INFLIGHT_ADMIN_KEY",
            code="no_admin_key",
        )
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    given = [http.headers.get(ADMIN_HEADER, ""), token if scheme.lower() == "bearer" else ""]
    if not any(hmac.compare_digest(_digest(one), _digest(key)) for one in given):
        raise APIError(403, f"the admin key is expected in the header {ADMIN_HEADER}", code="invalid_admin_key")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode("utf-8", "replace")).digest()


async def _model_of(gateway: Gateway, name: str | None) -> ServedModel:
    if name is not None:
        return await gateway.upstream.resolve(name)
    models = [model for model in await gateway.upstream.models() if model.info.get("adapters") is not None]
    if len(models) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise invalid(f"model: give the name of a model with enable_lora; models here: {names}", "model")
    return models[0]


async def _change(gateway: Gateway, model: ServedModel, name: str, parameters: dict[str, str | bool]) -> None:
    """Raises APIError: a NUL; a Triton has refused, or could not be reached; those that did not stay changed."""
    for key, value in parameters.items():
        if isinstance(value, str) and "\0" in value:  # Triton would end it there
            raise invalid(f"{key}: {value!r:.100} contains a NUL, which no name or path can; leave it out", key)
    answers = await gateway.replicas.control(model, name, parameters)
    gateway.upstream.forget()
    failed = {address: answer for address, answer in answers.items() if isinstance(answer, InflightError)}
    if not failed:
        return
    address, error = next(iter(failed.items()))
    shown = api_error(error)
    if "cannot be found" in error.message:
        shown = APIError(404, error.message, param="lora_name", code="not_found")
    if len(answers) > 1:
        done = [one for one in answers if one not in failed]
        also = f"; done at {', '.join(done)}" if done else ""
        if done and name == "load_adapter" and not parameters["load_inplace"]:
            also += "; to load it at the others, send load_inplace=true"
        raise APIError(shown.status, f"{address}: {shown.message}{also}", param=shown.param, code=shown.code)
    raise shown


def _said(text: str) -> Response:
    return Response(text, media_type="text/plain")
