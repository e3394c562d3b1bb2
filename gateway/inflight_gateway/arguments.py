"""A request's body and headers -> arguments of the client library."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.requests import Request

from inflight_gateway.bodies import SamplingBody, sampling_options
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import Gateway
from inflight_gateway.upstream import ServedModel

__all__ = ["base_arguments", "request_id_of"]

_INFLIGHT_ONLY = {"request_priority", "cache_salt"}  # inputs that other backends do not have
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")


def request_id_of(http: Request, body: SamplingBody) -> str:
    """The id of a request: the body's `request_id`, else the header `X-Request-Id`, else a random one.

    The answer's header `X-Request-Id` names it.

    Raises:
        APIError: the body's id has characters other than letters, digits and `. _ : ~ -`.
    """
    found = body.request_id
    if found is None:
        header = http.headers.get("x-request-id", "")
        found = header if _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
    elif not _REQUEST_ID.fullmatch(found):
        raise invalid("request_id: 1 to 128 letters, digits and . _ : ~ - are expected", "request_id")
    http.scope["request_id"] = found
    return found


def base_arguments(gateway: Gateway, http: Request, model: ServedModel, body: SamplingBody) -> dict[str, Any]:
    """The arguments of `AsyncClient.stream` that do not depend on the prompt; no request id.

    Raises:
        APIError: `n` out of range.
    """
    largest = gateway.options.max_n
    if body.n is not None and not 1 <= body.n <= largest:
        raise invalid(f"n: {body.n} came; 1 to {largest} are allowed", "n")
    arguments = sampling_options(body)
    arguments["model"] = model.name
    arguments["timeout"] = gateway.options.request_timeout
    if body.prompt_cache_key is not None:
        arguments["routing_key"] = body.prompt_cache_key
    if not model.is_inflight:
        known = {key: value for key, value in arguments.items() if key not in _INFLIGHT_ONLY}
        return known | {"return_token_ids": False}
    arguments["return_num_cached_tokens"] = True
    tenant = gateway.tenant(http, body.user)
    if tenant is not None:
        arguments["tenant"] = tenant
    return arguments
