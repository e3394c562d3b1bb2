"""`/v1/messages/count_tokens`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.anthropic.errors import REQUEST_ID
from inflight_gateway.anthropic.messages_body import CountTokensBody
from inflight_gateway.anthropic.messages_input import chat_of_count
from inflight_gateway.bodies import read_body
from inflight_gateway.gateway import gateway_of
from inflight_gateway.input_tokens import count_input_tokens
from inflight_gateway.response_headers import warn
from inflight_gateway.sse import encode_json

__all__ = ["count_tokens"]


async def count_tokens(http: Request) -> Response:
    """The number of tokens of the prompt that a message would have."""
    gateway = gateway_of(http)
    body = await read_body(http, CountTokensBody, gateway)
    chat = chat_of_count(body, lambda message: warn(http.scope, "ignored", message))
    answer = {"input_tokens": await count_input_tokens(gateway, http, chat)}
    headers = {REQUEST_ID: http.scope["request_id"]}
    return Response(encode_json(answer), headers=headers, media_type="application/json")
