"""The vectors of `LLM`, under vLLM's names.  No torch."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from inflight.frontend.errors import shown

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RerankResult",
    "ScoringOutput",
    "ScoringRequestOutput",
]


@dataclass(frozen=True)
class PoolingParams:
    """How vectors are made; names and defaults are vLLM's.

    Attributes:
        dimensions: size to which embeddings are cut, of a matryoshka model.
        use_activation: normalise embeddings; apply softmax or sigmoid to scores and classes.  None: as the checkpoint
            says.
        truncate_prompt_tokens: most tokens of a prompt, -1 for as many as fit; None: a longer one is an error.
        truncation_side: the one that is cut off, "left" or "right".

    Raises:
        ValueError: a value has the wrong type; the message names it and says what is allowed.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"

    def __post_init__(self) -> None:
        allowed = (
            ("dimensions", _integer, "an integer or None"),
            ("truncate_prompt_tokens", _integer, "an integer or None"),
            ("use_activation", _flag, "True, False or None"),
        )
        for name, read, what in allowed:
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, None if value is None else read(value))
            except TypeError:
                raise ValueError(f"{name}={shown(value)} of type {type(value).__name__}: must be {what}") from None
        if self.truncation_side not in ("left", "right"):
            raise ValueError(f'truncation_side={shown(self.truncation_side)}: must be "left" or "right"')


def _integer(value: Any) -> int:
    """An integer of Python or numpy; no boolean."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts match."""

    score: float


@dataclass(frozen=True)
class ClassificationOutput:
    """The probability of each class, in the order of the checkpoint's `id2label`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class _PooledOutput:
    """
    Attributes:
        request_id: unique among the requests of this engine; of two prompts, the first one's.
        prompt_token_ids: of two prompts, one after the other.
        num_cached_tokens: prompt tokens served by the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


@dataclass(frozen=True)
class EmbeddingRequestOutput(_PooledOutput):
    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringRequestOutput(_PooledOutput):
    outputs: ScoringOutput


@dataclass(frozen=True)
class ClassificationRequestOutput(_PooledOutput):
    """
    Attributes:
        label: the most probable class.
    """

    outputs: ClassificationOutput
    label: str


@dataclass(frozen=True)
class RerankResult:
    """A document in the order of its relevance.

    Attributes:
        index: its place among the documents that were given.
    """

    index: int
    document: str
    relevance_score: float
