"""The methods of `LLM` for vectors: embed, score, rerank, classify; and the part that those of `AsyncLLM` share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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

__all__ = ["ManyParams", "OpenVector", "PooledCalls", "PooledJob", "PooledJobs", "Progress"]

# False: no progress bar; True: one, where the standard error stream is a terminal or a notebook; or what makes one, as
# `tqdm.tqdm` does.
Progress = Union[bool, Callable[..., Any]]

# One for all prompts; one per prompt; None: the defaults.
ManyParams = Union[PoolingParams, Sequence[PoolingParams], None]

_GIVE = "give inflight.PoolingParams, or a list with one per prompt"


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


@dataclass(frozen=True)
class PooledJob:
    """A call for vectors: the prompts to compute, and how outputs are made of their vectors.

    Attributes:
        plans: each with prompts of its own.
        outputs: from the rows of all inputs, in their order, and the labels of classes.
    """

    plans: list[PooledPlan]
    outputs: Callable[[list[_Row], list[str]], list[Any]]

    def results(self, opened: Sequence[OpenVector]) -> list[Any]:
        """Of the prompts of all plans, which are finished."""
        rows, start = [], 0
        for plan in self.plans:
            rows += _rows(plan, opened[start : start + len(plan.prompts)])
            start += len(plan.prompts)
        return self.outputs(rows, self.plans[0].labels)


class PooledJobs:
    """Checks and tokenises calls for vectors; each raises ValueError for what cannot be served."""

    def __init__(self, prompts: PooledPrompts) -> None:
        self._prompts = prompts

    def embed(self, prompts: Any, params: ManyParams, instruction: str | None) -> PooledJob:
        plans = self._plans("embed", _texts(prompts), params, instruction)
        return PooledJob(
            plans, lambda rows, _: [EmbeddingRequestOutput(*row.common, EmbeddingOutput(row.values)) for row in rows]
        )

    def classify(self, prompts: Any, params: ManyParams) -> PooledJob:
        return PooledJob(
            self._plans("classify", _texts(prompts), params),
            lambda rows, labels: [
                ClassificationRequestOutput(
                    *row.common, ClassificationOutput(row.values), labels[int(np.argmax(row.values))]
                )
                for row in rows
            ],
        )

    def score(self, data_1: Any, data_2: Any, params: PoolingParams | None, instruction: str | None) -> PooledJob:
        ones, others = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        if len(ones) == 1:
            ones *= len(others)
        if len(ones) != len(others):
            raise ValueError(f"{len(ones)} texts, but {len(others)} to compare with: give one, or as many")
        pairs = [list(pair) for pair in zip(ones, others)]
        plans = self._plans("score", pairs, params, instruction)
        return PooledJob(
            plans, lambda rows, _: [ScoringRequestOutput(*row.common, ScoringOutput(row.values[0])) for row in rows]
        )

    def rerank(
        self, query: str, documents: Any, top_n: int | None, params: PoolingParams | None, instruction: str | None
    ) -> PooledJob:
        if top_n is not None and top_n < 1:
            raise ValueError(f"top_n={top_n}: must be at least 1")
        documents = [documents] if isinstance(documents, str) else list(documents)

        def ranked(rows: list[_Row], _: list[str]) -> list[RerankResult]:
            found = [RerankResult(i, documents[i], row.values[0]) for i, row in enumerate(rows)]
            return sorted(found, key=lambda result: -result.relevance_score)[:top_n]

        return PooledJob(self.score(query, documents, params, instruction).plans, ranked)

    def _plans(
        self, task: str, inputs: list[Any], params: ManyParams, instruction: str | None = None
    ) -> list[PooledPlan]:
        """One for all inputs, or one for each, if each has its own parameters."""
        if params is None or isinstance(params, PoolingParams):
            return [self._plan(task, inputs, params or PoolingParams(), instruction)]
        if isinstance(params, (str, bytes, Mapping)) or not isinstance(params, Sequence):
            raise ValueError(f"pooling_params of type {type(params).__name__}: {_GIVE}")
        if len(params) != len(inputs):
            raise ValueError(f"{len(inputs)} prompts, but {len(params)} pooling_params: give one for all or one each")
        each = [self._plan(task, [one], given, instruction, i) for i, (one, given) in enumerate(zip(inputs, params))]
        return each or [self._plan(task, [], PoolingParams(), instruction)]

    def _plan(
        self, task: str, inputs: list[Any], params: PoolingParams, instruction: str | None, place: int = 0
    ) -> PooledPlan:
        """`place` is that of the first input among all."""
        if not isinstance(params, PoolingParams):
            raise ValueError(f"pooling_params of type {type(params).__name__}: {_GIVE}")
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
            return self._prompts.plan(asked)
        except RequestError as error:
            raise ValueError(
                error.message.replace("inputs[0]", f"inputs[{place}]", 1) if place else error.message
            ) from None


class PooledCalls:
    """The methods of `LLM` whose results are vectors.  Their requests share batches with text generation."""

    pooled_prompts: PooledPrompts

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: ManyParams = None,
        use_tqdm: Progress = True,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt.

        Args:
            prompts: one or several, see `Prompt`.
            pooling_params: one for all prompts, or one per prompt.
            use_tqdm: see `Progress`.
            instruction: put before each text: the name of one of the checkpoint's prompts, or a text.
            lora_request: the adapter of all prompts; None: the checkpoint alone.

        Raises:
            ValueError: the checkpoint has no embeddings, or a prompt or parameter cannot be served; nothing has run.
            RequestError: a prompt failed in the engine.
            RuntimeError: as `LLM.generate`.
        """
        return self._run(self._jobs.embed(prompts, pooling_params, instruction), use_tqdm, lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: ManyParams = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each prompt.

        Raises:
            ValueError, RequestError, RuntimeError: as `embed`.
        """
        return self._run(self._jobs.classify(prompts, pooling_params), use_tqdm, lora_request)

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
        return self._run(self._jobs.score(data_1, data_2, pooling_params, instruction), use_tqdm, lora_request)

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
        return self._run(
            self._jobs.rerank(query, documents, top_n, pooling_params, instruction), use_tqdm, lora_request
        )

    @property
    def _jobs(self) -> PooledJobs:
        return PooledJobs(self.pooled_prompts)

    def _run(self, job: PooledJob, use_tqdm: Progress, adapter: LoRARequest | None) -> list[Any]:
        advanced: deque[Any] = deque()
        submitted = self._submit_pooled(job.plans, advanced.append, adapter)
        return job.results(self._wait_for(submitted, advanced, use_tqdm))

    def _submit_pooled(
        self, plans: Sequence[PooledPlan], advanced: Callable[[Any], None], adapter: LoRARequest | None
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
