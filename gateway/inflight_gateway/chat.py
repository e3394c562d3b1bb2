"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_client import Choice, GenerationResult
from inflight_gateway.answers import Answer
from inflight_gateway.arguments import request_id_of
from inflight_gateway.bodies import read_body
from inflight_gateway.chat_events import ChatEvents, finish_reason
from inflight_gateway.chat_logprobs import chat_logprobs
from inflight_gateway.chat_plan import ChatBody, ChatPlan, plan_chat
from inflight_gateway.gateway import gateway_of
from inflight_gateway.generation import complete, stream_events
from inflight_gateway.kv_transfer import transfer_answer
from inflight_gateway.legacy_logprobs import vllm_logprobs
from inflight_gateway.sse import encode_json
from inflight_gateway.stop_reason import shown_stop_reason
from inflight_gateway.usage import fingerprint_of, usage_of

__all__ = ["answer_chat", "chat_completions"]


async def chat_completions(http: Request) -> Response:
    """Answer a chat."""
    return await answer_chat(http, await read_body(http, ChatBody, gateway_of(http)))


async def answer_chat(http: Request, body: ChatBody) -> Response:
    """The answer to a chat whose body was read."""
    gateway = gateway_of(http)
    model = await gateway.upstream.resolve(body.model)
    plan = await plan_chat(gateway, http, model, body)
    request_id = request_id_of(http, body)
    request = {**plan.arguments, "request_id": request_id}
    head = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model.id,
        "system_fingerprint": fingerprint_of(gateway.options, model),
    }
    if body.stream:
        return await stream_events(gateway, http, [request], plan.limit, ChatEvents(head, body, plan))
    results = await complete(gateway, http, [{**request, "one_response": True}], plan.limit)
    found = _whole(head, body, plan, results[0]) | transfer_answer(body.kv_transfer_params)
    return Response(encode_json(found), media_type="application/json")


def _whole(head: dict[str, Any], body: ChatBody, plan: ChatPlan, result: GenerationResult) -> dict[str, Any]:
    choices = [_choice(choice, body, plan) for choice in result.choices]
    found = {**head, "choices": choices, "usage": usage_of([result], reasoning=plan.reasoning_tokens())}
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = vllm_logprobs(result.prompt_logprobs)
    if plan.prompt_token_ids is not None:
        found["prompt_token_ids"] = plan.prompt_token_ids
    return found


def _choice(choice: Choice, body: ChatBody, plan: ChatPlan) -> dict[str, Any]:
    answer = plan.parser().whole(choice.text, choice.finish_reason)
    logprobs = None
    if body.logprobs:
        tokens = chat_logprobs(choice.token_ids, choice.logprobs or [], body.top_logprobs or 0, body.ids_as_tokens)
        logprobs = {"content": tokens, "refusal": None}
    found = {
        "index": choice.index,
        "message": _message(answer, body, plan),
        "logprobs": logprobs,
        "finish_reason": finish_reason(choice.finish_reason, bool(answer.calls), body),
        "stop_reason": shown_stop_reason(choice.stop_reason, body.stop_token_ids),
    }
    if body.return_token_ids:
        found["token_ids"] = choice.token_ids
    return found


def _message(answer: Answer, body: ChatBody, plan: ChatPlan) -> dict[str, Any]:
    content = plan.echo + answer.content
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.calls:
        found["content"] = content or None
        calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
        if body.functions is not None:
            found["function_call"] = calls[0]
        else:
            ids = [call.id for call in answer.calls]
            found["tool_calls"] = [{"id": i, "type": "function", "function": call} for i, call in zip(ids, calls)]
    if answer.reasoning and plan.show_reasoning:
        found["reasoning_content"] = found["reasoning"] = answer.reasoning
        found["content"] = content or None
    return found
