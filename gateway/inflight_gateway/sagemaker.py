"""`/invocations` of Amazon SageMaker's containers: chats and completions on one path, as in vLLM.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.bodies import parse_body
from inflight_gateway.chat import answer_chat
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.completions import CompletionBody, answer_completion
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import gateway_of

__all__ = ["invocations"]


async def invocations(http: Request) -> Response:
    """Answer a body with `messages` as a chat, and one with `prompt` as a completion."""
    gateway = gateway_of(http)
    raw = await gateway.bodies.read(http)
    keys = _keys(raw)
    if "messages" not in keys and "prompt" not in keys:
        raise invalid("messages (a chat) or prompt (a completion) is expected; got neither", "messages")
    if "messages" in keys:
        return await answer_chat(http, parse_body(raw, ChatBody, gateway.options, http.scope))
    return await answer_completion(http, parse_body(raw, CompletionBody, gateway.options, http.scope))


def _keys(raw: bytes) -> dict[str, msgspec.Raw]:
    """The outermost keys of a JSON object."""
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not a JSON object: {error}") from None
