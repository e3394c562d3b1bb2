"""The methods of `AsyncLLM` for vectors: embed, score, rerank, classify."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from inflight.in_process.local_engine import LocalEngine
from inflight.in_process.lora import LoRARequest
from inflight.in_process.pooled_calls import ManyParams, OpenVector, PooledJob, PooledJobs
from inflight.in_process.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    RerankResult,
    ScoringRequestOutput,
)
from inflight.in_process.prompts import Prompt

__all__ = ["AsyncPooledCalls"]


class AsyncPooledCalls:
    """Arguments, results and errors are those of `LLM`'s methods; cancelling the task aborts its requests."""

    engine: LocalEngine

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: ManyParams = None,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt: see `LLM.embed`."""
        return await self._pooled(lambda jobs: jobs.embed(prompts, pooling_params, instruction), lora_request)

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: ManyParams = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each prompt: see `LLM.classify`."""
        return await self._pooled(lambda jobs: jobs.classify(prompts, pooling_params), lora_request)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` matches that of `data_1`: see `LLM.score`."""
        return await self._pooled(lambda jobs: jobs.score(data_1, data_2, pooling_params, instruction), lora_request)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[RerankResult]:
        """The documents that match the query best, best first: see `LLM.rerank`."""
        return await self._pooled(
            lambda jobs: jobs.rerank(query, documents, top_n, pooling_params, instruction), lora_request
        )

    async def _pooled(self, make: Callable[[PooledJobs], PooledJob], adapter: LoRARequest | None) -> list[Any]:
        loop, ended = asyncio.get_running_loop(), asyncio.Queue[OpenVector]()

        def advanced(request: OpenVector) -> None:
            """Called in the thread that steps."""
            with contextlib.suppress(RuntimeError):  # the loop was closed, and with it what waited
                loop.call_soon_threadsafe(ended.put_nowait, request)

        job = await asyncio.to_thread(lambda: make(PooledJobs(self.engine.pooled_prompts)))
        opened = await self._submitted(lambda: self.engine.submit_pooled(job.plans, advanced, adapter))
        left = {request.request_id for request in opened}
        try:
            while left:
                request = await ended.get()
                request.check()
                if request.finished:
                    left.discard(request.request_id)
        finally:
            if left:
                self._abort_all(opened)
        return job.results(opened)

    async def _submitted(self, submit: Callable[[], list[Any]]) -> list[Any]:
        raise NotImplementedError

    def _abort_all(self, requests: Sequence[Any]) -> None:
        raise NotImplementedError
