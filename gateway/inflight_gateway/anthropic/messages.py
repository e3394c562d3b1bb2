"""`/v1/messages`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_client import Choice, ChoiceDelta, StreamChunk
from inflight_gateway.anthropic.content_blocks import ContentBlocks
from inflight_gateway.anthropic.errors import REQUEST_ID, error_value
from inflight_gateway.anthropic.messages_body import MessagesBody
from inflight_gateway.anthropic.messages_input import chat_of_messages
from inflight_gateway.bodies import read_body
from inflight_gateway.chat_plan import ChatPlan, plan_chat
from inflight_gateway.errors import APIError
from inflight_gateway.gateway import gateway_of
from inflight_gateway.generation import complete, stream_events
from inflight_gateway.response_headers import warn
from inflight_gateway.sse import SSE, Framing, encode_json, named_event
from inflight_gateway.usage import UsageCounter, usage_of

__all__ = ["messages"]

_PING = named_event("ping", {"type": "ping"})
_FRAMING = Framing(SSE.media_type, _PING)


async def messages(http: Request) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(http)
    body = await read_body(http, MessagesBody, gateway)
    model = await gateway.upstream.resolve(body.model)
    chat = chat_of_messages(body, lambda message: warn(http.scope, "ignored", message))
    plan = await plan_chat(gateway, http, model, chat)
    request_id: str = http.scope["request_id"]
    request = {**plan.arguments, "request_id": request_id}
    head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model.id}
    answer = _Answer(head, plan)
    response: Response
    if body.stream:
        events = _Events(answer, plan, request_id)
        response = await stream_events(gateway, http, [request], plan.limit, events, _FRAMING)
    else:
        results = await complete(gateway, http, [{**request, "one_response": True}], plan.limit)
        answer.grow(results[0].choices[0])
        usage = usage_of(results, reasoning=plan.reasoning_tokens())
        response = Response(encode_json(answer.message(usage)), media_type="application/json")
    response.headers[REQUEST_ID] = request_id
    return response


class _Answer:
    """Parses the answer incrementally."""

    def __init__(self, head: dict[str, Any], plan: ChatPlan) -> None:
        self._head = head
        self._parser = plan.parser()
        self._content = ContentBlocks(plan.show_reasoning)
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def grow(self, delta: ChoiceDelta | Choice) -> list[dict[str, Any]]:
        """Add a part of the answer, or all of it; returns Anthropic's events."""
        found = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            found += self._parser.finish(delta.finish_reason)
        events = [event for one in found for event in self._content.add(one)]
        if delta.finish_reason is not None:
            events += self._content.finish()
            self._end = self._ended(delta)
        return events

    def _ended(self, delta: ChoiceDelta | Choice) -> dict[str, Any]:
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        if delta.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._parser.calls else "end_turn", "stop_sequence": None}

    @property
    def end(self) -> dict[str, Any]:
        """Why the answer ended; null while it grows."""
        return self._end

    def message(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The message so far, with OpenAI's `usage`."""
        return {**self._head, "content": self._content.blocks, **self._end, "usage": _usage(usage)}


class _Events:
    """Encodes the stream of a message.

    It begins with the first chunk, which says how long the prompt is.
    """

    def __init__(self, answer: _Answer, plan: ChatPlan, request_id: str) -> None:
        self._answer = answer
        self._request_id = request_id
        self._usage = UsageCounter(reasoning=plan.reasoning_tokens())
        self._started = False

    def begin(self) -> bytes:
        return b""

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        start = b""
        if not self._started:
            self._started = True
            self._usage.add(prompt, StreamChunk([], chunk.num_input_tokens, chunk.num_cached_tokens))
            start = _sent([{"type": "message_start", "message": self._answer.message(self._usage.usage())}])
            start += _PING
        self._usage.add(prompt, chunk)
        return start + _sent(self._answer.grow(chunk.choices[0]))

    def end(self) -> bytes:
        usage = _usage(self._usage.usage())
        return _sent([{"type": "message_delta", "delta": self._answer.end, "usage": usage}, {"type": "message_stop"}])

    def failed(self, error: APIError) -> bytes:
        return _sent([error_value(error, self._request_id)])


def _sent(events: list[dict[str, Any]]) -> bytes:
    return b"".join([named_event(event["type"], event) for event in events])


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage in the form of this API, where `input_tokens` leaves out what the cache had."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    found = {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
    if "completion_tokens_details" in usage:
        found["output_tokens_details"] = {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}
    return found
