"""Embeddings, scores and classes: the JSON that asks for them, and the arrays that come back.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from inflight_client.errors import ServerError
from inflight_client.request import checked_ids

__all__ = [
    "Classes",
    "Embeddings",
    "Pooled",
    "PoolingOptions",
    "RankedDocument",
    "Scores",
    "Texts",
    "TextsOrIds",
    "classes_of",
    "classification_of",
    "documents_of",
    "embedding_of",
    "embeddings_of",
    "pairs_of",
    "pooled_of",
    "pooling_of",
    "ranked",
    "scores_of",
    "scoring_of",
]

Texts = str | Sequence[str]
TextsOrIds = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | np.ndarray


class PoolingOptions(TypedDict, total=False):
    """Keyword arguments of `embed`, `score`, `rerank` and `classify`; the first three change the result.

    Attributes:
        truncate_prompt_tokens: keep at most this many tokens of each input, -1 for as many as the model takes.  Without
            it a longer input is an error.
        truncation_side: "right", the default, cuts the end off, "left" the beginning.
        instruction: of embeddings and scores: text in front of each input or query, or the name of a prompt of the
            checkpoint, such as "query".
        model ... trace_headers: see `RequestOptions`.
    """

    truncate_prompt_tokens: int
    truncation_side: str
    instruction: str
    model: str
    adapter: str
    request_id: str
    request_priority: int
    tenant: str
    cache_salt: str
    routing_key: str
    timeout: float | None
    trace_headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of texts.

    Attributes:
        vectors: float32 [inputs, dimensions], in the order of the inputs.
        token_counts: int32 [inputs], prompt tokens of each.
    """

    vectors: np.ndarray
    token_counts: np.ndarray


@dataclass(frozen=True, slots=True)
class Scores:
    """How well pairs of texts fit together.

    Attributes:
        scores: float32 [pairs].
        token_counts: int32 [pairs], prompt tokens of each.
    """

    scores: np.ndarray
    token_counts: np.ndarray


@dataclass(frozen=True, slots=True)
class Classes:
    """Probabilities of the checkpoint's classes.

    Attributes:
        probabilities: float32 [inputs, classes].
        labels: names of the classes.
        token_counts: int32 [inputs], prompt tokens of each.
    """

    probabilities: np.ndarray
    labels: list[str]
    token_counts: np.ndarray

    @property
    def best(self) -> list[str]:
        """The most probable class of each input."""
        return [self.labels[index] for index in self.probabilities.argmax(axis=1)]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document of `rerank`: its place among the given ones, and how well it fits the query."""

    index: int
    document: str
    score: float


@dataclass(frozen=True, slots=True)
class Pooled:
    """The response to a request with `pooling`: arrays as in `Embeddings`; `labels` is empty except for classes."""

    vectors: np.ndarray
    token_counts: np.ndarray
    labels: list[str]


# -- requests ----------------------------------------------------------------------------------------


def pooling_of(task: str, inputs: Sequence[Any], options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The JSON object of the input `pooling`; moves its keys out of `options`.

    Raises:
        TypeError: an option that requests for text have, but these do not.
    """
    known = PoolingOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; allowed are {', '.join(known)}")
    for name in ("truncate_prompt_tokens", "truncation_side", "instruction"):
        more[name] = options.pop(name, None)
    return {"task": task, "inputs": inputs, **{name: value for name, value in more.items() if value is not None}}


def embedding_of(
    inputs: TextsOrIds, options: dict[str, Any], dimensions: int | None, normalize: bool | None
) -> dict[str, Any]:
    """The JSON object for the embeddings of a text, of token ids, or of a list of either."""
    return pooling_of("embed", _each(inputs), options, dimensions=dimensions, normalize=normalize)


def classification_of(inputs: TextsOrIds, options: dict[str, Any], raw_scores: bool) -> dict[str, Any]:
    """The JSON object for the classes of a text, of token ids, or of a list of either."""
    return pooling_of("classify", _each(inputs), options, raw_scores=raw_scores or None)


def scoring_of(pairs: Sequence[tuple[str, str]], options: dict[str, Any], raw_scores: bool) -> dict[str, Any]:
    """The JSON object for the scores of pairs."""
    return pooling_of("score", [list(pair) for pair in pairs], options, raw_scores=raw_scores or None)


def _each(inputs: TextsOrIds) -> list[str | list[int]]:
    """The inputs as a list of texts and lists of token ids."""
    several: Any = inputs.tolist() if isinstance(inputs, np.ndarray) else inputs
    if isinstance(several, str) or (len(several) and isinstance(several[0], (int, np.integer))):
        several = [several]
    return [one if isinstance(one, str) else checked_ids(f"inputs[{i}]", one) for i, one in enumerate(several)]


def pairs_of(text_1: Texts, text_2: Texts) -> list[tuple[str, str]]:
    """The pairs of 1:1, 1:n and n:n texts.

    Raises:
        ValueError: other numbers of texts.
    """
    first = [text_1] if isinstance(text_1, str) else list(text_1)
    second = [text_2] if isinstance(text_2, str) else list(text_2)
    if not first or not second or len(first) not in (1, len(second)):
        raise ValueError(
            f"{len(first)} and {len(second)} texts cannot be paired: give one and any number of others, or as many "
            "of both"
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second))


def documents_of(documents: Texts, top_n: int | None) -> list[str]:
    """The documents of a ranking as a list; raises ValueError if `top_n` is less than 1."""
    if top_n is not None and top_n < 1:
        raise ValueError(f"top_n={top_n}: must be at least 1, or None for all")
    return [documents] if isinstance(documents, str) else list(documents)


# -- responses ---------------------------------------------------------------------------------------


def pooled_of(columns: Mapping[str, Any], inputs: int) -> Pooled:
    """The outputs of the response.

    Args:
        columns: `pooled` as an array or a list, row after row.
        inputs: number of inputs of the request.

    Raises:
        ServerError: the outputs do not fit each other, or the request.
    """
    table = np.asarray(columns["pooled"], dtype=np.float32).reshape(-1)
    counts = np.asarray(columns.get("pooled_token_counts", ()), dtype=np.int32)
    if not inputs or len(counts) != inputs or len(table) % inputs or not len(table):
        raise ServerError(
            f"the server sent {len(table)} numbers and {len(counts)} token counts for {inputs} inputs; expected a "
            "count for each input, and as many numbers for each"
        )
    return Pooled(table.reshape(inputs, -1), counts, list(columns.get("labels", ())))


def _answered(pooled: Pooled | None) -> Pooled:
    if pooled is None:
        raise ServerError("the server ended the request without its vectors")
    return pooled


def embeddings_of(pooled: Pooled | None) -> Embeddings:
    """The response to `embedding_of`; raises ServerError if there was none, as the next two do."""
    found = _answered(pooled)
    return Embeddings(found.vectors, found.token_counts)


def scores_of(pooled: Pooled | None) -> Scores:
    """The response to `scoring_of`."""
    found = _answered(pooled)
    if found.vectors.shape[1] != 1:
        raise ServerError(f"the server sent {found.vectors.shape[1]} numbers for each pair; expected one")
    return Scores(found.vectors[:, 0], found.token_counts)


def classes_of(pooled: Pooled | None) -> Classes:
    """The response to a request for classes."""
    found = _answered(pooled)
    if found.vectors.shape[1] != len(found.labels):
        raise ServerError(f"the server sent {found.vectors.shape[1]} probabilities for {len(found.labels)} labels")
    return Classes(found.vectors, found.labels, found.token_counts)


def ranked(documents: Sequence[str], scores: np.ndarray, top_n: int | None) -> list[RankedDocument]:
    """The documents in the order of their scores, the best first; equal ones keep theirs."""
    order = np.argsort(-scores, kind="stable")[:top_n]
    return [RankedDocument(int(index), documents[index], float(scores[index])) for index in order]
