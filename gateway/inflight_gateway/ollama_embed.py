"""`/api/embed` and the older `/api/embeddings`, in Ollama's form."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import msgspec
import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.bodies import Body, read_body
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import gateway_of
from inflight_gateway.ollama import ollama_model
from inflight_gateway.ollama_input import OllamaBody
from inflight_gateway.pooled import PiecewiseResponse, ask, encode_rows, inputs_of
from inflight_gateway.pooled_bodies import EmbeddingBody
from inflight_gateway.sse import encode_json
from inflight_gateway.translations import Translation

__all__ = ["OllamaEmbedBody", "OllamaEmbeddingsBody", "ollama_embed", "ollama_embeddings"]


class _EmbedBody(Body, kw_only=True):
    """The common keys; options concern answers, or how a model is loaded."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"options"})
    TRANSLATED: ClassVar[dict[str, Translation]] = OllamaBody.TRANSLATED

    model: str


class OllamaEmbedBody(_EmbedBody, kw_only=True):
    """A request to `/api/embed`.  `truncate`, true by default: a longer text is cut off at the end."""

    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsBody(_EmbedBody, kw_only=True):
    """A request to `/api/embeddings`: one text, which is cut off if it is too long."""

    prompt: str | None = None


async def ollama_embed(http: Request) -> Response:
    """The vectors of texts, each of length 1."""
    arrived, gateway = time.perf_counter(), gateway_of(http)
    body = await read_body(http, OllamaEmbedBody, gateway)
    model = await ollama_model(gateway, body.model)
    if body.input in (None, "", []):  # loads a model in Ollama; here it is loaded already
        return Response(encode_json({"model": body.model, "embeddings": []}), media_type="application/json")
    if not isinstance(body.input, str) and not _are_texts(body.input):
        raise invalid("input: a text or a list of texts is expected", "input")
    asked = EmbeddingBody(input=body.input, truncate_prompt_tokens=None if body.truncate is False else -1)
    pooling = {
        "task": "embed",
        "inputs": await inputs_of(gateway, model, asked),
        "dimensions": body.dimensions,
        "normalize": True,
    }
    sent = time.perf_counter()
    pooled = await ask(gateway, http, model, asked, "input", pooling)
    ended = time.perf_counter()
    tail = {
        "total_duration": round((ended - arrived) * 1e9),
        "load_duration": round((sent - arrived) * 1e9),
        "prompt_eval_count": int(pooled.token_counts.sum()),
    }
    head = {"model": body.model}
    # In a thread, as for `/v1/embeddings`: millions of numbers take a while.
    return PiecewiseResponse(
        await asyncio.to_thread(encode_rows, head, "embeddings", map(_encoded, pooled.vectors), tail)
    )


async def ollama_embeddings(http: Request) -> Response:
    """The vector of one text, of the length that the model gives it."""
    gateway = gateway_of(http)
    body = await read_body(http, OllamaEmbeddingsBody, gateway)
    model = await ollama_model(gateway, body.model)
    if not body.prompt:
        return Response(encode_json({"embedding": []}), media_type="application/json")
    asked = EmbeddingBody(truncate_prompt_tokens=-1)
    pooling = {"task": "embed", "inputs": [body.prompt], "normalize": False}
    pooled = await ask(gateway, http, model, asked, "prompt", pooling)
    vector = msgspec.Raw(_encoded(pooled.vectors[0]))
    return Response(encode_json({"embedding": vector}), media_type="application/json")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _encoded(vector: np.ndarray) -> bytes:
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
