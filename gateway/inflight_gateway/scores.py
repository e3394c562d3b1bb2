"""`/v1/score`, in vLLM's form."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_gateway.bodies import read_body
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import Gateway, gateway_of
from inflight_gateway.pooled import check_count, head_of, texts_of, usage_of_inputs
from inflight_gateway.pooled_bodies import ScoreBody
from inflight_gateway.rerank import pair_scores
from inflight_gateway.sse import encode_json

__all__ = ["score"]

_NAMES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


async def score(http: Request) -> Response:
    """How well the texts of each pair fit together."""
    gateway = gateway_of(http)
    body = await read_body(http, ScoreBody, gateway)
    pairs, param = _pairs(gateway, body)
    model = await gateway.upstream.resolve(body.model)
    head = head_of(http, body, model, "score")
    pooled, scores = await pair_scores(gateway, http, model, body, param, pairs, body.instruction)
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    return Response(
        encode_json({**head, "data": data, "usage": usage_of_inputs(pooled)}), media_type="application/json"
    )


def _pairs(gateway: Gateway, body: ScoreBody) -> tuple[list[list[str]], str]:
    """The pairs, and the key of the second texts.

    Raises:
        APIError: other keys, or numbers of texts that make no pairs.
    """
    given = {key for names in _NAMES for key in names if getattr(body, key) is not None}
    names = next((names for names in _NAMES if given == set(names)), None)
    if names is None:
        allowed = ", ".join(" and ".join(one) for one in _NAMES)
        shown = ", ".join(sorted(given)) or "none of them"
        raise invalid(f"text_1: got {shown}; two keys are expected, of {allowed}", "text_1")
    values: list[Any] = [getattr(body, name) for name in names]
    first, second = (texts_of(value, name) for value, name in zip(values, names))
    check_count(gateway, len(second), names[1])
    if len(first) not in (1, len(second)):
        raise invalid(
            f"{names[0]}: {len(first)} texts came, and {len(second)} of {names[1]}; one is expected, or as many",
            names[0],
        )
    if len(first) == 1:
        first *= len(second)
    return [[one, other] for one, other in zip(first, second)], names[1]
