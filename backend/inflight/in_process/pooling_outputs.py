"""The vectors of `LLM`, under vLLM's names.  No torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"


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
