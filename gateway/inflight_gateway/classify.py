"""`/classify`, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from inflight_client.errors import ServerError
from inflight_client.pooling import Classes, Pooled, classes_of
from inflight_gateway.bodies import read_body
from inflight_gateway.errors import api_error
from inflight_gateway.gateway import gateway_of
from inflight_gateway.pooled import PiecewiseResponse, ask, encode_rows, head_of, inputs_of, usage_of_inputs
from inflight_gateway.pooled_bodies import ClassifyBody

__all__ = ["classify"]


async def classify(http: Request) -> Response:
    """The probabilities of the model's classes for each input."""
    gateway = gateway_of(http)
    body = await read_body(http, ClassifyBody, gateway)
    model = await gateway.upstream.resolve(body.model)
    pooling = {
        "task": "classify",
        "inputs": await inputs_of(gateway, model, body),
        "raw_scores": None if body.use_activation is None else not body.use_activation,
    }
    head = head_of(http, body, model, "classify")
    pooled = await ask(gateway, http, model, body, "messages" if body.messages else "input", pooling)
    try:
        classes = classes_of(pooled)
    except ServerError as error:
        raise api_error(error) from None
    return PiecewiseResponse(await asyncio.to_thread(_encoded, head, pooled, classes))


def _encoded(head: dict[str, Any], pooled: Pooled, classes: Classes) -> list[bytes]:
    rows = [
        _row(index, label, vector) for index, (label, vector) in enumerate(zip(classes.best, classes.probabilities))
    ]
    return encode_rows(head, "data", rows, {"usage": usage_of_inputs(pooled)})


def _row(index: int, label: str, vector: np.ndarray) -> bytes:
    value = {"index": index, "label": label, "probs": vector, "num_classes": len(vector)}
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
