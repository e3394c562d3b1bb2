"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from inflight_client.pooling import Pooled
from inflight_gateway.bodies import read_body
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import gateway_of
from inflight_gateway.pooled import PiecewiseResponse, ask, encode_rows, head_of, inputs_of, usage_of_inputs
from inflight_gateway.pooled_bodies import EmbeddingBody

__all__ = ["embeddings"]


async def embeddings(http: Request) -> Response:
    """The vector of each input."""
    gateway = gateway_of(http)
    body = await read_body(http, EmbeddingBody, gateway)
    encode = _encoder(body.encoding_format)
    model = await gateway.upstream.resolve(body.model)
    pooling = {
        "task": "embed",
        "inputs": await inputs_of(gateway, model, body),
        "dimensions": body.dimensions,
        "normalize": body.use_activation,
        "instruction": body.instruction,
    }
    head = head_of(http, body, model, "embd")
    pooled = await ask(gateway, http, model, body, "messages" if body.messages else "input", pooling)
    # Millions of numbers take a while: other requests go on meanwhile, since the thread gives way between two rows.
    return PiecewiseResponse(await asyncio.to_thread(_encoded, head, pooled, encode))


def _encoder(encoding_format: str | None) -> Callable[[np.ndarray], bytes]:
    """Encodes a vector as JSON: as numbers, or as base64 of their bytes, which OpenAI's clients ask for."""
    if encoding_format in (None, "float"):
        return lambda vector: orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
    if encoding_format == "base64":
        return lambda vector: b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
    raise invalid(f"encoding_format: {encoding_format!r} came; float or base64 is expected", "encoding_format")


def _encoded(head: dict[str, Any], pooled: Pooled, encode: Callable[[np.ndarray], bytes]) -> list[bytes]:
    rows = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, encode(vector))
        for index, vector in enumerate(pooled.vectors)
    )
    return encode_rows(head, "data", rows, {"usage": usage_of_inputs(pooled)})
