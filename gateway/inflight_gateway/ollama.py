"""`/api/chat` and `/api/generate`, in Ollama's form: the gateway's chats and completions, translated."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.answers import AnswerParser
from inflight_gateway.arguments import request_id_of
from inflight_gateway.bodies import SamplingBody, read_body
from inflight_gateway.chat_plan import ChatBody, plan_chat
from inflight_gateway.completions import CompletionBody, checked_prompts, completion_requests
from inflight_gateway.errors import APIError
from inflight_gateway.gateway import Gateway, gateway_of
from inflight_gateway.generation import complete, stream_events
from inflight_gateway.length_limit import LengthLimit
from inflight_gateway.ollama_input import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_of_chat,
    chat_of_generate,
    completion_of_generate,
)
from inflight_gateway.ollama_lines import OllamaLines, Shape, chat_shape, generate_shape, now
from inflight_gateway.response_headers import warn
from inflight_gateway.sse import Framing, encode_json
from inflight_gateway.upstream import ServedModel

__all__ = ["NDJSON", "ollama_chat", "ollama_generate", "ollama_model"]

NDJSON = "application/x-ndjson"
_TAG = ":latest"  # Ollama's tag of a name that has none


async def ollama_chat(http: Request) -> Response:
    """Answer a chat."""
    arrived, gateway = time.perf_counter(), gateway_of(http)
    body = await read_body(http, OllamaChatBody, gateway)
    model = await ollama_model(gateway, body.model)
    if not body.messages:
        return _loaded(body, chat_shape)
    chat = chat_of_chat(body, partial(warn, http.scope, "ignored"))
    return await _answer_chat(http, arrived, model, body, chat, chat_shape)


async def ollama_generate(http: Request) -> Response:
    """Answer a prompt, rendered by the model's chat template unless it is raw or has a suffix."""
    arrived, gateway = time.perf_counter(), gateway_of(http)
    body = await read_body(http, OllamaGenerateBody, gateway)
    model = await ollama_model(gateway, body.model)
    if not body.prompt and not body.suffix:
        return _loaded(body, generate_shape)
    say = partial(warn, http.scope, "ignored")
    has_template = "messages" in model.inputs and model.info.get("has_chat_template", True)
    if not body.raw and not body.suffix and has_template:
        return await _answer_chat(http, arrived, model, body, chat_of_generate(body, say), generate_shape)
    completion = completion_of_generate(body, say)
    return await _answer_completion(http, arrived, model, body, completion)


async def ollama_model(gateway: Gateway, name: str) -> ServedModel:
    """The model of a request, with or without Ollama's tag.

    Raises:
        APIError: as `Upstream.resolve`.
    """
    try:
        return await gateway.upstream.resolve(name.removesuffix(_TAG))
    except APIError as error:
        if error.code != "model_not_found" or not name.endswith(_TAG):
            raise
    return await gateway.upstream.resolve(name)


async def _answer_chat(
    http: Request, arrived: float, model: ServedModel, body: OllamaBody, chat: ChatBody, shape: Shape
) -> Response:
    plan = await plan_chat(gateway_of(http), http, model, chat)
    lines = _lines(body, shape, plan.parser(), plan.show_reasoning, arrived)
    return await _answer(http, body, chat, plan.arguments, plan.limit, lines)


async def _answer_completion(
    http: Request, arrived: float, model: ServedModel, body: OllamaBody, completion: CompletionBody
) -> Response:
    gateway = gateway_of(http)
    prompts = checked_prompts(gateway, completion)
    (arguments,) = completion_requests(gateway, http, model, completion, prompts)
    lines = _lines(body, generate_shape, AnswerParser(None, None), True, arrived)
    return await _answer(http, body, completion, arguments, LengthLimit.of("num_predict", -1, model), lines)


def _lines(body: OllamaBody, shape: Shape, parser: AnswerParser, shows: bool, arrived: float) -> OllamaLines:
    top = (body.top_logprobs or 0) if body.logprobs else None
    return OllamaLines(body.model, shape, parser, shows, top, arrived)


async def _answer(
    http: Request,
    body: OllamaBody,
    sampling: SamplingBody,
    arguments: dict[str, Any],
    limit: LengthLimit,
    lines: OllamaLines,
) -> Response:
    gateway = gateway_of(http)
    request = {**arguments, "request_id": request_id_of(http, sampling)}
    if body.stream is not False:
        framing = Framing(NDJSON, lines.keep_alive())
        return await stream_events(gateway, http, [request], limit, lines, framing)
    # Not as one response, which would not tell when the first token came.
    (result,) = await complete(gateway, http, [request], limit)
    return Response(lines.whole(result), media_type="application/json")


def _loaded(body: OllamaBody, shape: Shape) -> Response:
    """The answer to a request without a prompt, which loads a model in Ollama; here it is loaded already."""
    value = {"model": body.model, "created_at": now(), **shape("", "", []), "done": True, "done_reason": "load"}
    return Response(encode_json(value), media_type="application/json")
