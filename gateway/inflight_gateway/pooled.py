"""The common part of embeddings, scores, rankings and classes: from a body to a request at Triton, and its answer."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight_client.errors import ServerError
from inflight_client.pooling import Pooled
from inflight_gateway.arguments import request_id_of
from inflight_gateway.errors import APIError, api_error, invalid
from inflight_gateway.gateway import Gateway
from inflight_gateway.generation import Generation
from inflight_gateway.length_limit import check_ids
from inflight_gateway.pooled_bodies import InputBody, PooledBody
from inflight_gateway.request_templates import check_request_template
from inflight_gateway.tracing import trace_headers
from inflight_gateway.upstream import ServedModel

__all__ = [
    "EXPECTED",
    "PiecewiseResponse",
    "ask",
    "check_count",
    "encode_rows",
    "head_of",
    "inputs_of",
    "text_of",
    "texts_of",
    "usage_of_inputs",
]

EXPECTED = "a text, a list of token ids, or a list of either is expected"

_ROWS = 32  # of a piece of an answer
_SIDES = ("left", "right")
_CHAT = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
# The backend's names of keys -> those of bodies.
_KEYS = {"normalize": "use_activation", "raw_scores": "use_activation", "task": "model"}
_INPUT = re.compile(r"inputs\b(?P<place>\[\d+\])?")


def head_of(http: Request, body: PooledBody, model: ServedModel, prefix: str) -> dict[str, Any]:
    """The first keys of an answer.

    Raises:
        APIError: the body's `request_id` is not valid.
    """
    return {
        "id": f"{prefix}-{request_id_of(http, body)}",
        "object": "list",
        "created": int(time.time()),
        "model": model.id,
    }


def usage_of_inputs(pooled: Pooled) -> dict[str, int]:
    """OpenAI's `usage`; nothing is generated."""
    tokens = int(pooled.token_counts.sum())
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def check_count(gateway: Gateway, count: int, param: str) -> None:
    """Raise APIError unless a request can have so many inputs."""
    most = gateway.options.max_inputs
    if not 1 <= count <= most:
        raise invalid(f"{param}: {count} entries came; 1 to {most} are allowed (max_inputs)", param)


async def inputs_of(gateway: Gateway, model: ServedModel, body: InputBody) -> list[str | list[int]]:
    """The texts or token ids of a body, at least one.

    Raises:
        APIError: they are not valid, or the chat cannot be rendered.
    """
    if (body.input is None) == (body.messages is None):
        raise invalid("input: give exactly one of input and messages", "input", "missing_required_parameter")
    if body.messages is not None:
        return [await _chat_ids(gateway, model, body)]
    for key in _CHAT:
        if getattr(body, key) is not None and (key, getattr(body, key)) != ("add_special_tokens", True):
            raise invalid(f"{key}: only for messages; leave it out", key)
    value = body.input
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise invalid(f"input: {EXPECTED}", "input")
    check_count(gateway, len(value), "input")
    most = model.info.get("max_model_len") if body.truncate_prompt_tokens is None else None
    for i, one in enumerate(value):
        if not one or not (isinstance(one, str) or (isinstance(one, list) and {int}.issuperset(map(type, one)))):
            raise invalid(f"input[{i}]: {EXPECTED}, none of them empty", "input")
        if isinstance(one, list):
            check_ids(f"input[{i}]", len(one), most, "max_model_len")
    return value


async def _chat_ids(gateway: Gateway, model: ServedModel, body: InputBody) -> list[int]:
    """The token ids of `messages`; as in vLLM, no answer begins behind them unless the body says so."""
    check_request_template(gateway.options, body.chat_template)
    options = {key: value for key in _CHAT if (value := getattr(body, key)) is not None}
    if not body.continue_final_message:
        options.setdefault("add_generation_prompt", False)
    found = await gateway.upstream.tokenize(model, messages=body.messages, **options)
    ids: list[int] = found["tokens"]
    return ids


async def ask(
    gateway: Gateway, http: Request, model: ServedModel, body: PooledBody, param: str, pooling: Mapping[str, Any]
) -> Pooled:
    """The vectors of a request.

    Args:
        param: key of the body that errors of an input are about.
        pooling: task, inputs, and what is not in `PooledBody`; None: not given.

    Raises:
        APIError: the request is not valid, or it failed.
        ClientGone: the client disconnected.
    """
    if "pooling" not in model.inputs:
        raise invalid(f"model: the backend of {model.name!r} computes no vectors of texts, only answers", "model")
    if body.truncation_side not in (None, *_SIDES):
        raise invalid(f"truncation_side: {body.truncation_side!r} came; left or right is expected", "truncation_side")
    asked = {
        **pooling,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "truncation_side": body.truncation_side,
    }
    arguments = {
        **_arguments(gateway, http, model, body),
        "pooling": {key: value for key, value in asked.items() if value is not None},
    }
    try:
        async with Generation(gateway, http, [arguments]) as generation:
            await generation.results()
            (found,) = generation.pooled()
    except APIError as error:
        raise _renamed(error, param) from None
    if found is None:
        raise api_error(ServerError("the model ended the request without its vectors"))
    return found


def _arguments(gateway: Gateway, http: Request, model: ServedModel, body: PooledBody) -> dict[str, Any]:
    given = {
        "request_priority": body.priority,
        "cache_salt": body.cache_salt,
        "tenant": gateway.tenant(http, body.user),
        "trace_headers": trace_headers(http.scope) or None,
        "adapter": model.adapter,
    }
    return {
        "model": model.name,
        "timeout": gateway.options.request_timeout,
        "request_id": request_id_of(http, body),
        **{key: value for key, value in given.items() if value is not None},
    }


def _renamed(error: APIError, param: str) -> APIError:
    """An error of the backend in the words of the body."""
    if error.status != 400:
        return error
    found = _INPUT.match(error.message)
    if found:
        return invalid(f"{param}{found['place'] or ''}{error.message[found.end() :]}", param)
    if error.param in _KEYS:
        error.param = _KEYS[error.param]
    return error


def text_of(value: Any, param: str) -> str:
    """A document or query: a text, or an object with `text`.

    Raises:
        APIError: it is neither, or empty.
    """
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise invalid(f'{param}: a text, or an object such as {{"text": "..."}}, is expected, not empty', _key(param))
    return text


def texts_of(value: Any, param: str) -> list[str]:
    """Texts, or one of them; raises APIError as `text_of`."""
    if not isinstance(value, list):
        return [text_of(value, param)]
    return [text_of(one, f"{param}[{i}]") for i, one in enumerate(value)]


def _key(param: str) -> str:
    return param.partition("[")[0]


def encode_rows(head: Mapping[str, Any], key: str, rows: Iterable[bytes], tail: Mapping[str, Any]) -> list[bytes]:
    """A JSON object whose `key` is a list of encoded values, between the keys of `head` and `tail`; in pieces.

    No piece is large: copying all of the up to 23 MB at once would keep other threads waiting.
    """
    pieces = [b"%b,%b:[" % (msgspec.json.encode(head)[:-1], msgspec.json.encode(key))]
    remaining = iter(rows)
    separator = b""
    while some := list(itertools.islice(remaining, _ROWS)):
        pieces += [separator, b",".join(some)]
        separator = b","
    return [*pieces, b"]," + msgspec.json.encode(tail)[1:]]


class PiecewiseResponse(Response):
    """A JSON body in pieces, each sent when the client has taken most of those before."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
