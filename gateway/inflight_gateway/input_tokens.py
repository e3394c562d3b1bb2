"""`/v1/responses/input_tokens`, and the length of a chat's prompt."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.bodies import read_body
from inflight_gateway.chat_plan import ChatBody, plan_chat
from inflight_gateway.gateway import Gateway, gateway_of
from inflight_gateway.response_headers import warn
from inflight_gateway.responses_input import ResponsesBody, chat_of_responses
from inflight_gateway.sse import encode_json

__all__ = ["InputTokensBody", "count_input_tokens", "input_tokens"]


class InputTokensBody(ResponsesBody, kw_only=True):
    """The body of a response; only the keys that make up the prompt have an effect."""

    IGNORED: ClassVar[frozenset[str]] = ResponsesBody.IGNORED.union({"personality"})


async def input_tokens(http: Request) -> Response:
    """The number of tokens of the prompt that a response would have."""
    gateway = gateway_of(http)
    body = await read_body(http, InputTokensBody, gateway)
    chat = chat_of_responses(body, lambda message: warn(http.scope, "ignored", message))
    answer = {"object": "response.input_tokens", "input_tokens": await count_input_tokens(gateway, http, chat)}
    return Response(encode_json(answer), media_type="application/json")


async def count_input_tokens(gateway: Gateway, http: Request, chat: ChatBody) -> int:
    """The number of tokens of a chat's prompt.

    Raises:
        APIError: the chat is not valid, or its model cannot tell.
    """
    model = await gateway.upstream.resolve(chat.model)
    plan = await plan_chat(gateway, http, model, msgspec.structs.replace(chat, return_token_ids=True))
    return len(plan.prompt_token_ids or ())
