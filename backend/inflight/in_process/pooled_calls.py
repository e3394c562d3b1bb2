"""`LLM`'s methods for vectors: embed, score, rerank, classify."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from inflight.engine.deltas import RequestFailed, SequenceDelta
from inflight.frontend.errors import RequestError
from inflight.frontend.request.pooled_prompts import Asked, PooledPlan, PooledPrompts
from inflight.in_process.lora import LoRARequest
from inflight.in_process.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from inflight.in_process.prompts import Prompt, is_prompt, listed, text_or_ids

__all__ = ["OpenVector", "PooledCalls", "Progress"]

# False: no progress bar; True: one, where the standard error stream is a terminal or a notebook; or what makes one, as
# `tqdm.tqdm` does.
Progress = Union[bool, Callable[..., Any]]


@dataclass
class OpenVector:
    """A prompt whose vector is being computed; see `OpenRequest`.

    Attributes:
        vector: float32 [D], once it is there.
    """

    request_id: int
    prompt_token_ids: list[int]
    advanced: Callable[[Any], None]
    vector: np.ndarray | None = None
    num_cached_tokens: int = 0
    failure: RequestFailed | None = None

    @property
    def result(self) -> OpenVector:
        return self

    @property
    def finished(self) -> bool:
        return self.vector is not None

    def check(self) -> None:
        """Raise RequestError if the engine gave it up."""
        if self.failure is not None:
            raise RequestError(self.failure.code, self.failure.message)  # type: ignore[arg-type]

    def take(self, delta: SequenceDelta) -> bool:
        """Process a delta; no stop string ends it."""
        if delta.pooled is not None:
            self.vector = np.frombuffer(delta.pooled, dtype=np.float32)
            self.num_cached_tokens = delta.num_cached_tokens or 0
        return False


@dataclass(frozen=True)
class _Row:
    """The result of one input: its numbers, and what all outputs have."""

    values: list[float]
    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int

    @property
    def common(self) -> tuple[str, list[int], int, bool]:
        return self.request_id, self.prompt_token_ids, self.num_cached_tokens, True


class PooledCalls:
    """The methods of `LLM` whose results are vectors.  Their requests share batches with text generation."""

    pooled_prompts: PooledPrompts

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt.

        Args:
            prompts: one or several, see `Prompt`.
            use_tqdm: see `Progress`.
            instruction: put before each text: the name of one of the checkpoint's prompts, or a text.
            lora_request: the adapter of all prompts; None: the checkpoint alone.

        Raises:
            ValueError: the checkpoint has no embeddings, or a prompt or parameter cannot be served; nothing has run.
            RequestError: a prompt failed in the engine.
            RuntimeError: as `LLM.generate`.
        """
        rows, _ = self._pooled("embed", _texts(prompts), pooling_params, use_tqdm, instruction, lora_request)
        return [EmbeddingRequestOutput(*row.common, EmbeddingOutput(row.values)) for row in rows]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each prompt.

        Raises:
            ValueError, RequestError, RuntimeError: as `embed`.
        """
        rows, labels = self._pooled("classify", _texts(prompts), pooling_params, use_tqdm, None, lora_request)
        return [
            ClassificationRequestOutput(
                *row.common, ClassificationOutput(row.values), labels[int(np.argmax(row.values))]
            )
            for row in rows
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` matches that of `data_1` in its place, or the only one.

        Args:
            instruction: what a match is, for a checkpoint whose prompts or template take it.

        Raises:
            ValueError, RequestError, RuntimeError: as `embed`.
        """
        ones, others = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        if len(ones) == 1:
            ones *= len(others)
        if len(ones) != len(others):
            raise ValueError(f"{len(ones)} texts, but {len(others)} to compare with: give one, or as many")
        pairs = [list(pair) for pair in zip(ones, others)]
        rows, _ = self._pooled("score", pairs, pooling_params, use_tqdm, instruction, lora_request)
        return [ScoringRequestOutput(*row.common, ScoringOutput(row.values[0])) for row in rows]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[RerankResult]:
        """The documents that match the query best, best first.

        Args:
            top_n: how many; None: all.

        Raises:
            ValueError, RequestError, RuntimeError: as `embed`.
        """
        if top_n is not None and top_n < 1:
            raise ValueError(f"top_n={top_n}: must be at least 1")
        documents = [documents] if isinstance(documents, str) else list(documents)
        scored = self.score(
            query,
            documents,
            pooling_params=pooling_params,
            use_tqdm=use_tqdm,
            instruction=instruction,
            lora_request=lora_request,
        )
        found = [RerankResult(i, documents[i], output.outputs.score) for i, output in enumerate(scored)]
        return sorted(found, key=lambda result: -result.relevance_score)[:top_n]

    def _pooled(
        self,
        task: str,
        inputs: list[Any],
        params: PoolingParams | None,
        use_tqdm: Progress,
        instruction: str | None,
        adapter: LoRARequest | None,
    ) -> tuple[list[_Row], list[str]]:
        params = params or PoolingParams()
        is_embedding = task == "embed"
        asked = Asked(
            task,
            inputs,
            dimensions=params.dimensions,
            normalize=params.use_activation if is_embedding else None,
            truncate=params.truncate_prompt_tokens,
            side=params.truncation_side,
            instruction=instruction,
            raw_scores=params.use_activation is False and not is_embedding,
        )
        try:
            plan = self.pooled_prompts.plan(asked)
        except RequestError as error:
            raise ValueError(error.message) from None
        advanced: deque[Any] = deque()
        submitted = self._submit_pooled(plan, advanced.append, adapter)
        opened: list[OpenVector] = self._wait_for(submitted, advanced, use_tqdm)
        return _rows(plan, opened), plan.labels

    def _submit_pooled(
        self, plan: PooledPlan, advanced: Callable[[Any], None], adapter: LoRARequest | None
    ) -> list[Any]:
        raise NotImplementedError

    def _wait_for(self, requests: list[Any], advanced: deque[Any], use_tqdm: Progress) -> list[Any]:
        raise NotImplementedError


def _texts(prompts: Any) -> list[Any]:
    """Each a text or a list of token ids."""
    prompts = listed(prompts)
    found = []
    for prompt in [prompts] if is_prompt(prompts) else prompts:
        text, ids = text_or_ids(prompt)
        found.append(text if ids is None else ids)
    return found


def _rows(plan: PooledPlan, opened: Sequence[OpenVector]) -> list[_Row]:
    results = plan.results([request.vector for request in opened if request.vector is not None])
    pairs = plan.pairs or [(place, place) for place in range(len(opened))]
    rows = []
    for values, (one, other) in zip(results.tolist(), pairs):
        parts = [opened[one]] if plan.pairs is None else [opened[one], opened[other]]
        token_ids = [token for part in parts for token in part.prompt_token_ids]
        rows.append(_Row(values, str(parts[0].request_id), token_ids, sum(part.num_cached_tokens for part in parts)))
    return rows
