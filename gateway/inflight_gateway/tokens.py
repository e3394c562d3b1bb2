"""`/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.bodies import Body, read_body
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import gateway_of
from inflight_gateway.request_templates import TEMPLATE_KEYS, check_request_template
from inflight_gateway.sse import encode_json

__all__ = ["DetokenizeBody", "TokenizeBody", "detokenize", "tokenize"]


class TokenizeBody(Body, kw_only=True):
    """A text (`prompt`) or a chat (`messages`, with the keys of its template)."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"mm_processor_kwargs": (None,)}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Body, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


async def tokenize(http: Request) -> Response:
    """The token ids of a text or chat."""
    gateway = gateway_of(http)
    body = await read_body(http, TokenizeBody, gateway)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give exactly one of prompt and messages", "prompt")
    check_request_template(gateway.options, body.chat_template)
    model = await gateway.upstream.resolve(body.model)
    question: dict[str, Any] = {"prompt": body.prompt, "messages": body.messages}
    for key in ("add_special_tokens", "return_token_strs", *TEMPLATE_KEYS):
        if (value := getattr(body, key)) is not None:
            if key in TEMPLATE_KEYS and body.messages is None:
                raise invalid(f"{key} is for messages; a prompt has no chat template", key)
            question[key] = value
    answer = await gateway.upstream.tokenize(model, **question)
    return Response(encode_json({"token_strs": None, **answer}), media_type="application/json")


async def detokenize(http: Request) -> Response:
    """The text of token ids."""
    gateway = gateway_of(http)
    body = await read_body(http, DetokenizeBody, gateway)
    model = await gateway.upstream.resolve(body.model)
    text = await gateway.upstream.detokenize(model, body.tokens)
    return Response(encode_json({"prompt": text}), media_type="application/json")
