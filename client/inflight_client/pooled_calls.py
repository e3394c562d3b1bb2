"""`embed`, `score`, `rerank` and `classify` of both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inflight_client.pooling import (
    Classes,
    Embeddings,
    Pooled,
    PoolingOptions,
    RankedDocument,
    Scores,
    Texts,
    TextsOrIds,
    classes_of,
    classification_of,
    documents_of,
    embedding_of,
    embeddings_of,
    pairs_of,
    ranked,
    scores_of,
    scoring_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncPooledCalls", "PooledCalls"]


class PooledCalls:
    """Of the blocking client."""

    def _pooled(self, pooling: Mapping[str, Any], options: Any) -> Pooled | None:
        """The response to a request with `pooling` and other options of the client's `stream`."""
        raise NotImplementedError

    def embed(
        self,
        inputs: TextsOrIds,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """The vectors of texts.

        Args:
            inputs: a text, token ids, or a list of either; at most 2,048.
            dimensions: size of each vector, for checkpoints that allow it; None: the checkpoint's.
            normalize: whether the vectors have length 1; None: as the checkpoint does.
            options: see `PoolingOptions`.

        Raises:
            ValueError, TypeError: the arguments are not valid.
            InflightError: the request failed, such as for a checkpoint that has no embeddings.
        """
        rest: dict[str, Any] = dict(options)
        pooling = embedding_of(inputs, rest, dimensions, normalize)
        return embeddings_of(self._pooled(pooling, rest))

    def score(
        self, text_1: Texts, text_2: Texts, *, raw_scores: bool = False, **options: Unpack[PoolingOptions]
    ) -> Scores:
        """How well texts fit together: of a reranker its score of each pair, else the cosine of their vectors.

        Args:
            text_1, text_2: a text and one or several others, or as many of both, which make up the pairs.
            raw_scores: leave out the sigmoid or softmax of a reranker.
            options, errors: as in `embed`.
        """
        rest: dict[str, Any] = dict(options)
        pooling = scoring_of(pairs_of(text_1, text_2), rest, raw_scores)
        return scores_of(self._pooled(pooling, rest))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options: Unpack[PoolingOptions],
    ) -> list[RankedDocument]:
        """The documents in the order in which they fit the query, the best first; `top_n` of them, None for all.

        Arguments and errors as in `score`.
        """
        given = documents_of(documents, top_n)
        return ranked(given, self.score(query, given, raw_scores=raw_scores, **options).scores, top_n)

    def classify(self, inputs: TextsOrIds, *, raw_scores: bool = False, **options: Unpack[PoolingOptions]) -> Classes:
        """The probabilities of the checkpoint's classes for each text; arguments and errors as in `embed`.

        Args:
            raw_scores: the numbers before the softmax or sigmoid.
        """
        rest: dict[str, Any] = dict(options)
        pooling = classification_of(inputs, rest, raw_scores)
        return classes_of(self._pooled(pooling, rest))


class AsyncPooledCalls:
    """Of the asyncio client; arguments, results and errors as in `PooledCalls`."""

    async def _pooled(self, pooling: Mapping[str, Any], options: Any) -> Pooled | None:
        """As of `PooledCalls`."""
        raise NotImplementedError

    async def embed(
        self,
        inputs: TextsOrIds,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """As `Client.embed`."""
        rest: dict[str, Any] = dict(options)
        pooling = embedding_of(inputs, rest, dimensions, normalize)
        return embeddings_of(await self._pooled(pooling, rest))

    async def score(
        self, text_1: Texts, text_2: Texts, *, raw_scores: bool = False, **options: Unpack[PoolingOptions]
    ) -> Scores:
        """As `Client.score`."""
        rest: dict[str, Any] = dict(options)
        pooling = scoring_of(pairs_of(text_1, text_2), rest, raw_scores)
        return scores_of(await self._pooled(pooling, rest))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options: Unpack[PoolingOptions],
    ) -> list[RankedDocument]:
        """As `Client.rerank`."""
        given = documents_of(documents, top_n)
        return ranked(given, (await self.score(query, given, raw_scores=raw_scores, **options)).scores, top_n)

    async def classify(
        self, inputs: TextsOrIds, *, raw_scores: bool = False, **options: Unpack[PoolingOptions]
    ) -> Classes:
        """As `Client.classify`."""
        rest: dict[str, Any] = dict(options)
        pooling = classification_of(inputs, rest, raw_scores)
        return classes_of(await self._pooled(pooling, rest))
