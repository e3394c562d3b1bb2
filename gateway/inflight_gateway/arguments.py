"""A request's body and headers -> arguments of the client library."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from inflight_gateway.bodies import SamplingBody, sampling_options
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import Gateway
from inflight_gateway.pooled_bodies import PooledBody
from inflight_gateway.response_headers import REQUEST_ID
from inflight_gateway.tracing import trace_headers
from inflight_gateway.upstream import ServedModel

__all__ = ["base_arguments", "request_id_of"]

_INFLIGHT_ONLY = {"request_priority", "cache_salt"}  # inputs that other backends do not have


def request_id_of(http: Request, body: SamplingBody | PooledBody) -> str:
    """The id of a request: the body's `request_id`, else that of `ResponseHeaders`.

    Raises:
        APIError: the body's id has characters other than letters, digits and `. _ : ~ -`.
    """
    given = body.request_id
    if given is not None:
        if not REQUEST_ID.fullmatch(given):
            raise invalid("request_id: 1 to 128 letters, digits and . _ : ~ - are expected", "request_id")
        http.scope["request_id"] = given
    found: str = http.scope["request_id"]
    return found


def base_arguments(gateway: Gateway, http: Request, model: ServedModel, body: SamplingBody) -> dict[str, Any]:
    """The arguments of `AsyncClient.stream` that do not depend on the prompt; no request id.

    Raises:
        APIError: `n` out of range, or a `best_of` that is not `n`.
    """
    largest = gateway.options.max_n
    if body.n is not None and not 1 <= body.n <= largest:
        raise invalid(f"n: {body.n} came; 1 to {largest} are allowed", "n")
    if body.best_of not in (None, body.n or 1):
        raise invalid(f"best_of: {body.best_of} came; only n, which is {body.n or 1}, is supported", "best_of")
    arguments = sampling_options(body)
    arguments["model"] = model.name
    if model.adapter is not None:
        arguments["adapter"] = model.adapter
    arguments["timeout"] = gateway.options.request_timeout
    if body.prompt_cache_key is not None:
        arguments["routing_key"] = body.prompt_cache_key
    if not model.is_inflight:
        known = {key: value for key, value in arguments.items() if key not in _INFLIGHT_ONLY}
        return known | {"return_token_ids": False}
    arguments["return_num_cached_tokens"] = True
    if (body.stop or body.stop_token_ids) and "return_stop_reason" in model.inputs:
        arguments["return_stop_reason"] = True
    if headers := trace_headers(http.scope):
        arguments["trace_headers"] = headers
    tenant = gateway.tenant(http, body.user)
    if tenant is not None:
        arguments["tenant"] = tenant
    return arguments
