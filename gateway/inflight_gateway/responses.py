"""`/v1/responses`, without state: nothing is stored, and requests cannot refer to stored objects."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_client import Choice, ChoiceDelta, StreamChunk
from inflight_gateway.arguments import request_id_of
from inflight_gateway.bodies import read_body
from inflight_gateway.chat_logprobs import chat_logprobs
from inflight_gateway.chat_plan import ChatPlan, plan_chat
from inflight_gateway.errors import APIError
from inflight_gateway.gateway import gateway_of
from inflight_gateway.generation import complete, stream_events
from inflight_gateway.kv_transfer import transfer_answer
from inflight_gateway.response_headers import warn
from inflight_gateway.response_items import ResponseItems
from inflight_gateway.responses_input import ResponsesBody, chat_of_responses
from inflight_gateway.sse import encode_json, named_event
from inflight_gateway.tool_parsers import CallEnd
from inflight_gateway.usage import UsageCounter, usage_of

__all__ = ["responses"]


async def responses(http: Request) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(http)
    body = await read_body(http, ResponsesBody, gateway)
    model = await gateway.upstream.resolve(body.model)
    chat = chat_of_responses(body, lambda message: warn(http.scope, "ignored", message))
    plan = await plan_chat(gateway, http, model, chat)
    request_id = request_id_of(http, body)
    request = {**plan.arguments, "request_id": request_id}
    limit = replace(plan.limit, key="max_output_tokens")
    answer = _Answer(_head(body, f"resp_{request_id}", model.id), body, plan)
    if body.stream:
        return await stream_events(gateway, http, [request], limit, _Events(answer, plan))
    results = await complete(gateway, http, [{**request, "one_response": True}], limit)
    answer.grow(results[0].choices[0])
    found = answer.response(usage_of(results, reasoning=plan.reasoning_tokens()))
    return Response(encode_json(found | transfer_answer(body.kv_transfer_params)), media_type="application/json")


def _head(body: ResponsesBody, response_id: str, model: str) -> dict[str, Any]:
    """The keys of the response that are known before it begins."""
    tools = [tool for tool in body.tools or [] if isinstance(tool, dict) and tool.get("type") == "function"]
    reasoning = body.reasoning or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} | (body.text or {}),
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"parameters": None, "strict": False, **tool} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class _Answer:
    """Parses the answer of a response incrementally."""

    def __init__(self, head: dict[str, Any], body: ResponsesBody, plan: ChatPlan) -> None:
        self._head = head
        self._top = body.top_logprobs or 0
        self._with_logprobs = "logprobs" in plan.arguments
        self._parser = plan.parser()
        self._items = ResponseItems()
        self._held: list[dict[str, Any]] = []  # log probabilities of tokens before their text is sent
        self._reason: str | None = None

    def grow(self, delta: ChoiceDelta | Choice) -> list[dict[str, Any]]:
        """Add a part of the answer, or all of it; returns OpenAI's events."""
        if self._with_logprobs and delta.logprobs:
            self._held += chat_logprobs(delta.token_ids, delta.logprobs, self._top)
        found = self._parser.feed(delta.text) if delta.text else []
        whole = delta.finish_reason != "length"
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            ends = self._parser.finish(delta.finish_reason)
            found += [one for one in ends if whole or not isinstance(one, CallEnd)]  # truncated: they stay open
        events = []
        for event in found:
            events += self._items.add(event, self._held)
            self._held = []
        if delta.finish_reason is not None:
            events += self._items.finish(whole)
        return events

    def response(self, usage: dict[str, Any] | None, error: APIError | None = None) -> dict[str, Any]:
        """The response object so far; without usage it is in progress."""
        status = "in_progress"
        if error is not None:
            status = "failed"
        elif usage is not None:
            status = "incomplete" if self._reason == "length" else "completed"
        return {
            **self._head,
            "status": status,
            "error": None if error is None else {"code": _code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items.items,
            "usage": None if usage is None else _usage(usage),
        }


class _Events:
    """Encodes the stream of a response: numbered events; the last one contains the whole response."""

    def __init__(self, answer: _Answer, plan: ChatPlan) -> None:
        self._answer = answer
        self._usage = UsageCounter(reasoning=plan.reasoning_tokens())
        self._number = 0

    def begin(self) -> bytes:
        response = self._answer.response(None)
        return self._sent({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        self._usage.add(prompt, chunk)
        return self._sent(self._answer.grow(chunk.choices[0]))

    def end(self) -> bytes:
        response = self._answer.response(self._usage.usage())
        return self._sent([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: APIError) -> bytes:
        return self._sent([{"type": "response.failed", "response": self._answer.response(None, error)}])

    def _sent(self, events: Iterable[dict[str, Any]]) -> bytes:
        sent = []
        for event in events:
            sent.append(named_event(event["type"], {**event, "sequence_number": self._number}))
            self._number += 1
        return b"".join(sent)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage in the form of this API; unknown numbers of reasoning tokens are 0."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


def _code(error: APIError) -> str:
    """The most similar code that a response can have."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
