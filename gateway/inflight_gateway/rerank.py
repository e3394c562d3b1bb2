"""`/rerank`, in the form of Jina and vLLM, with what Cohere adds: a document's order by how well it fits a query."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight_client.errors import ServerError
from inflight_client.pooling import Pooled, ranked, scores_of
from inflight_gateway.bodies import read_body
from inflight_gateway.errors import api_error, invalid
from inflight_gateway.gateway import Gateway, gateway_of
from inflight_gateway.pooled import ask, check_count, head_of, text_of, texts_of, usage_of_inputs
from inflight_gateway.pooled_bodies import PooledBody, RerankBody
from inflight_gateway.sse import encode_json
from inflight_gateway.upstream import ServedModel

__all__ = ["pair_scores", "rerank"]

_COHERES = {"/v1/rerank": "1", "/v2/rerank": "2"}  # versions of its API
_UNIT = 100  # documents that Cohere counts as one search unit
_AT_ONCE = 16  # documents that are shortened at the same time


async def rerank(http: Request) -> Response:
    """The documents, the one that fits the query best first."""
    gateway = gateway_of(http)
    body = await read_body(http, RerankBody, gateway)
    query, documents = _checked(gateway, body)
    model = await gateway.upstream.resolve(body.model)
    head = head_of(http, body, model, "rerank")
    shortened = documents
    if body.max_tokens_per_doc is not None:
        shortened = await _shortened(gateway, model, documents, body.max_tokens_per_doc)
    pairs = [[query, document] for document in shortened]
    pooled, scores = await pair_scores(gateway, http, model, body, "documents", pairs, body.instruction)
    results: list[dict[str, Any]] = []
    for one in ranked(documents, pooled.vectors[:, 0], body.top_n or None):
        result = {"index": one.index, "relevance_score": scores[one.index]}
        results.append(result if body.return_documents is False else {**result, "document": {"text": one.document}})
    answer = {"id": head["id"], "model": head["model"], "usage": usage_of_inputs(pooled), "results": results}
    if (version := _COHERES.get(http.url.path)) is not None:
        units = {"search_units": math.ceil(len(documents) / _UNIT)}
        answer["meta"] = {"api_version": {"version": version}, "billed_units": units}
    return Response(encode_json(answer), media_type="application/json")


def _checked(gateway: Gateway, body: RerankBody) -> tuple[str, list[str]]:
    """Query and documents; raises APIError."""
    query = text_of(body.query, "query")
    if not isinstance(body.documents, list):
        raise invalid("documents: a list of texts, or of objects with text, is expected", "documents")
    check_count(gateway, len(body.documents), "documents")
    if body.top_n is not None and body.top_n < 0:
        raise invalid(f"top_n: {body.top_n} came; at least 1 is expected, or 0 for all", "top_n")
    limit = body.max_tokens_per_doc
    if limit is not None and limit < 1:
        raise invalid(f"max_tokens_per_doc: {limit} came; at least 1 is expected", "max_tokens_per_doc")
    return query, texts_of(body.documents, "documents")


async def _shortened(gateway: Gateway, model: ServedModel, documents: list[str], limit: int) -> list[str]:
    """The first `limit` tokens of each document."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def shorten(document: str) -> str:
        if len(document.encode("utf-8", "surrogatepass")) <= limit:  # a token has at least a byte
            return document
        async with places:
            ids = (await gateway.upstream.tokenize(model, prompt=document, add_special_tokens=False))["tokens"]
            if len(ids) <= limit:
                return document
            text = await gateway.upstream.detokenize(model, ids[:limit])
            return text.rstrip("\ufffd") or document[:1]  # the rest of a character that was cut

    tasks = [asyncio.create_task(shorten(document)) for document in documents]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # the first failure ends the request, and the others are not asked any more
        for task in tasks:
            task.cancel()


async def pair_scores(
    gateway: Gateway,
    http: Request,
    model: ServedModel,
    body: PooledBody,
    param: str,
    pairs: list[list[str]],
    instruction: str | None,
) -> tuple[Pooled, list[float]]:
    """The response with the scores of pairs, and these as numbers; arguments and errors as of `ask`."""
    size, most = sum(len(one) + len(other) for one, other in pairs), gateway.options.max_body_bytes
    if size > most:  # one text can be in all of them
        raise invalid(
            f"{param}: {len(pairs)} pairs came, with {size} characters in all; at most {most} are allowed "
            "(max_body_bytes), so send fewer or shorter texts",
            param,
        )
    raw = None if body.use_activation is None else not body.use_activation
    pooling = {"task": "score", "inputs": pairs, "raw_scores": raw, "instruction": instruction}
    pooled = await ask(gateway, http, model, body, param, pooling)
    try:
        return pooled, scores_of(pooled).scores.tolist()
    except ServerError as error:
        raise api_error(error) from None
