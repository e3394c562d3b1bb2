"""Cohere's package, whose rerank has two versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cohere
import pytest
from asked import BEST, DOCUMENTS, KEY, MODEL, QUERY, ROOT, SECONDS
from cohere.core.request_options import RequestOptions

ONCE: Any = RequestOptions(max_retries=0)


@pytest.fixture(params=[cohere.Client, cohere.ClientV2], ids=["v1", "v2"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield request.param(api_key=KEY, base_url=ROOT, timeout=SECONDS)


class TestReranking:
    def test_the_best_come_first(self, client: Any) -> None:
        answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
        assert answer.results[0].index == BEST and len(answer.results) == 2
        scores = [result.relevance_score for result in answer.results]
        assert scores[0] == pytest.approx(1.0) and scores[0] >= scores[1]
        assert answer.meta.billed_units.search_units == 1

    def test_the_beginning_of_each_document(self) -> None:
        client = cohere.ClientV2(api_key=KEY, base_url=ROOT, timeout=SECONDS)
        long = [f"{QUERY} {'It rains. ' * 100}", DOCUMENTS[0]]
        answer = client.rerank(model=MODEL, query=QUERY, documents=long, max_tokens_per_doc=4)
        assert answer.results[0].index == 0 and answer.results[0].relevance_score > 0.99


class TestErrors:
    def test_they_become_the_exceptions_of_the_package(self, client: Any) -> None:
        asked = {"query": QUERY, "documents": DOCUMENTS, "request_options": ONCE}
        with pytest.raises(cohere.NotFoundError):
            client.rerank(model="rerank-v3.5", **asked)
        with pytest.raises(cohere.BadRequestError):
            client.rerank(model=MODEL, **{**asked, "documents": []})
        wrong = type(client)(api_key="wrong", base_url=ROOT, timeout=SECONDS)
        with pytest.raises(cohere.UnauthorizedError):
            wrong.rerank(model=MODEL, **asked)


class TestAsync:
    @pytest.mark.parametrize("kind", [cohere.AsyncClient, cohere.AsyncClientV2], ids=["v1", "v2"])
    async def test_the_best_come_first(self, kind: Any) -> None:
        answer = await kind(api_key=KEY, base_url=ROOT, timeout=SECONDS).rerank(
            model=MODEL, query=QUERY, documents=DOCUMENTS
        )
        assert answer.results[0].index == BEST and len(answer.results) == 3
