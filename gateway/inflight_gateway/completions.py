"""`/v1/completions`."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from inflight_client import Choice, ChoiceDelta, GenerationResult, StreamChunk
from inflight_gateway.arguments import base_arguments, request_id_of
from inflight_gateway.bodies import SamplingBody, read_body
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.gateway import gateway_of
from inflight_gateway.generation import complete, failed_events, stream_events
from inflight_gateway.sse import DONE, EventTemplate, encode_json, event
from inflight_gateway.usage import UsageCounter, fingerprint_of, usage_of

__all__ = ["CompletionBody", "completions"]


class CompletionBody(SamplingBody, kw_only=True):
    """A completion request.  `prompt`: a text, token ids, or a list of either."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "suffix": (None, ""),
        "use_beam_search": (None, False),
        "prompt_embeds": (None,),
    }

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None


async def completions(http: Request) -> Response:
    """Continue each prompt."""
    gateway = gateway_of(http)
    body = await read_body(http, CompletionBody, gateway.options)
    prompts = _prompts(body.prompt, gateway.options.max_prompts)
    model = await gateway.upstream.resolve(body.model)
    arguments = base_arguments(gateway, http, model, body)
    if body.logprobs is not None:
        arguments["logprobs"] = body.logprobs
    request_id = request_id_of(http, body)
    requests = [{**arguments, **prompt, "request_id": f"{request_id}-{index}"} for index, prompt in enumerate(prompts)]
    head = {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": fingerprint_of(gateway.options, model),
    }
    if body.stream:
        return await stream_events(gateway, http, requests, _Events(head, body, prompts))
    results = await complete(gateway, http, [{**request, "one_response": True} for request in requests])
    return Response(encode_json(_whole(head, body, results)), media_type="application/json")


def _prompts(value: Any, limit: int) -> list[dict[str, Any]]:
    """The arguments of `AsyncClient.stream` for each prompt."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise invalid("prompt: a text, a list of token ids, or a list of either is expected", "prompt")
    if len(value) > limit:
        raise invalid(f"prompt: {len(value)} prompts came; at most {limit} are allowed (max_prompts)", "prompt")
    return [_prompt(one) for one in value]


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return {"input_ids": value}
    raise invalid("prompt: a text, a list of token ids, or a list of either is expected", "prompt")


def _whole(head: dict[str, Any], body: CompletionBody, results: list[GenerationResult]) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    choices = [_choice(choice, index) for index, choice in enumerate(c for one in results for c in one.choices)]
    return {**head, "choices": choices, "usage": usage_of(results)}


def _choice(choice: Choice | ChoiceDelta, index: int) -> dict[str, Any]:
    return {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}


class _Events:
    """Encodes the stream of a request.

    Args:
        head: what all chunks share.
        body: the request.
        prompts: arguments of its upstream requests.
    """

    def __init__(self, head: dict[str, Any], body: CompletionBody, prompts: list[dict[str, Any]]) -> None:
        self._head = {**head, "usage": None} if body.include_usage else head
        self._body = body
        self._n = body.n or 1
        self._usage = UsageCounter(len(prompts))
        self._templates: dict[tuple[int, str | None], EventTemplate] = {}
        for index, prompt in enumerate(prompts):
            if "input_ids" in prompt:
                self._usage.expect(index, len(prompt["input_ids"]))

    def begin(self) -> bytes:
        return b""

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        self._usage.add(prompt, chunk)
        return b"".join(
            [
                self._delta(prompt * self._n + delta.index, delta)
                for delta in chunk.choices
                if delta.text or delta.finish_reason
            ]
        )

    def _delta(self, index: int, delta: ChoiceDelta) -> bytes:
        if self._body.continuous_usage:
            return event({**self._head, "choices": [_choice(delta, index)], "usage": self._usage.usage()})
        key = index, delta.finish_reason
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = EventTemplate(lambda text: self._value(index, delta, text))
        return template.fill(delta.text)

    def _value(self, index: int, delta: ChoiceDelta, text: str) -> dict[str, Any]:
        return {**self._head, "choices": [{**_choice(delta, index), "text": text}]}

    def end(self) -> bytes:
        if self._body.include_usage:
            return event({**self._head, "choices": [], "usage": self._usage.usage()}) + DONE
        return DONE

    def failed(self, error: APIError) -> bytes:
        return failed_events(error)
