"""The stream of a request whose prompt one Triton computes, and whose answer another one continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

from inflight_client import GenerationResult, InflightError, RequestCancelledError, StreamChunk, UnavailableError
from inflight_client.errors import DeadlineExceededError, InvalidRequestError, ServerUnreachableError
from inflight_client.pooling import Pooled
from inflight_client.request import GenerationRequest
from inflight_client.results import ResultBuilder
from inflight_gateway.errors import APIError
from inflight_gateway.handover_policy import LEAST_TOKENS, Costs, Prompt
from inflight_gateway.upstream import AnyStream, AnyUpstream, ServedModel, Upstream

__all__ = ["HandoverStream", "Outcome", "Prefill"]

# handed_over: the other Triton continued the answer.  ended: the first token was all of it.  failed, refused, late,
# mismatch: the Triton for prompts broke, refused, took too long, or serves something else; busy: none was free.  In
# these cases the whole request went to the other one.
Outcome = Literal["handed_over", "ended", "failed", "refused", "late", "mismatch", "busy"]


class Prefill(Protocol):
    """A Triton for prompts.

    Attributes:
        address: `host:port`.
        upstream: calls it; no call is repeated.
        queued: tokens of prompts that it computes now, for this process.
    """

    address: str
    upstream: Upstream
    queued: int

    def answered(self) -> None: ...

    def failed(self, why: str, retry_after: float | None = None) -> None:
        """It should get no requests for some seconds."""


class _Mismatch(Exception):
    """The Triton for prompts serves something else under the same name."""


class HandoverStream:
    """As an `AsyncStream`, of two.

    The Triton for prompts gets the request as it is, and is cancelled after the first token, so the rest is that of any
    stream that was interrupted there: `AsyncStream.rest`.  If it yields no token, the whole request goes to the others.

    Args:
        upstream: the Tritons that generate.
        request: of one sequence.
        prefill: None: measure what the prompt costs without.
        prompt: estimated.
        costs: of the model; what is measured is added.
        report: called with the outcome, if there is a Triton for prompts.
        gap: called with the seconds between the first token and the next one.

    Attributes:
        request: as it was given.
        pooled: None.
    """

    def __init__(
        self,
        upstream: AnyUpstream,
        request: GenerationRequest,
        prefill: Prefill | None,
        prompt: Prompt,
        costs: Costs,
        report: Callable[[Outcome], None],
        gap: Callable[[float], None],
    ) -> None:
        self.request = request
        self.pooled: Pooled | None = None
        self._upstream = upstream
        self._prefill = prefill
        self._prompt = prompt
        self._costs = costs
        self._report = report
        self._gap = gap
        self._builder = ResultBuilder(1, None if request.input_ids is None else len(request.input_ids))
        self._started = time.perf_counter()
        self._cancelled = False
        self._stream: AnyStream | None = None  # the present one
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self._chunks

    @property
    def num_input_tokens(self) -> int | None:
        return self._builder.num_input_tokens

    @property
    def resumptions(self) -> int:
        """Of interrupted streams; a handover is none."""
        return 0 if self._stream is None else self._stream.resumptions

    def result(self) -> GenerationResult:
        """As `AsyncStream.result`."""
        return self._builder.build(self.request.request_id, self.request.model, 1, self._elapsed())

    def cancel(self) -> None:
        """Cancel the request at the Triton that has it."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def _run(self) -> AsyncIterator[StreamChunk]:
        rest: GenerationRequest | None = self.request
        first = None
        if self._prefill is not None:
            first, rest = await self._prefilled(self._prefill)
        if rest is None:  # the answer is complete
            assert first is not None
            yield self._taken(first)
            return
        self._check_cancelled()
        opened = self._elapsed()
        self._stream = stream = self._upstream.send(rest.changed(timeout=self._left()))
        if first is not None:
            yield self._taken(first)
        awaited = True
        async for chunk in stream:
            if awaited and self.request.stream:
                awaited = False
                self._measure(chunk, opened, first is not None)
            if first is not None:
                chunk.num_cached_tokens = None  # the caller's are those of the Triton that computed the prompt
            chunk.elapsed += opened
            yield self._taken(chunk)

    async def _prefilled(self, prefill: Prefill) -> tuple[StreamChunk | None, GenerationRequest | None]:
        """The first token's chunk, and the request for the rest, None if that was all.

        Without a chunk: the whole request.
        """
        self._check_cancelled()
        tokens = self._prompt.tokens - self._prompt.cached
        limit = self._costs.patience(time.monotonic(), prefill.queued + tokens)
        prefill.queued += tokens
        outcome: Outcome
        try:
            found = await asyncio.wait_for(self._first_token(prefill), limit)
        except asyncio.TimeoutError:
            outcome = "late"
            prefill.failed(f"no token within {limit:.1f} s")
        except _Mismatch:
            outcome = "mismatch"
        except (InvalidRequestError, DeadlineExceededError):  # the other Triton says the same
            outcome = "refused"
        except (InflightError, APIError) as error:
            self._check_cancelled()
            is_gone = not isinstance(error, UnavailableError) or isinstance(error, ServerUnreachableError)
            outcome = "failed" if is_gone else "refused"
            prefill.failed(error.message, error.retry_after if isinstance(error, UnavailableError) else None)
        else:
            prefill.answered()
            self._report("ended" if found[1] is None else "handed_over")
            return found
        finally:
            prefill.queued -= tokens
            if self._stream is not None:
                self._stream.cancel()
        self._report(outcome)
        return None, self.request

    async def _first_token(self, prefill: Prefill) -> tuple[StreamChunk, GenerationRequest | None]:
        model = await self._upstream.find(self.request.model)
        if not _is_same(model, await _found(prefill.upstream, model.name), self.request.adapter):
            raise _Mismatch
        sent = time.monotonic()
        self._stream = stream = prefill.upstream.send(self.request.changed(stream=True, timeout=self._left()))
        async for chunk in stream:
            if not chunk.choices[0].num_tokens and chunk.finish_reason is None:
                continue
            rest = stream.rest()
            if chunk.finish_reason is None:
                if rest.resume_token_ids is None:  # nothing that another server can continue
                    raise _Mismatch
                if self.request.adapter is not None and rest.adapter_digest != model.adapters.get(self.request.adapter):
                    raise _Mismatch
            computed = (chunk.num_input_tokens or self._prompt.tokens) - (chunk.num_cached_tokens or 0)
            if computed >= LEAST_TOKENS:
                self._costs.prefill.add(time.monotonic(), (time.monotonic() - sent) / computed)
            if chunk.finish_reason is not None:
                return chunk, None
            return chunk, rest.changed(stream=self.request.stream, return_token_ids=self.request.return_token_ids)
        raise InflightError("its stream ended without a token")

    def _measure(self, chunk: StreamChunk, opened: float, was_handed_over: bool) -> None:
        now, took = time.monotonic(), self._elapsed() - opened
        if was_handed_over:
            self._costs.transfer.add(now, took)
            self._gap(took)
            return
        computed = (chunk.num_input_tokens or self._prompt.tokens) - (chunk.num_cached_tokens or 0)
        if computed >= LEAST_TOKENS:
            self._costs.alone.add(now, took / computed)

    def _taken(self, chunk: StreamChunk) -> StreamChunk:
        self._builder.add(chunk)
        return chunk

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _left(self) -> float | None:
        timeout = self.request.timeout
        return None if timeout is None else max(timeout - self._elapsed(), 1e-6)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise RequestCancelledError("the request was cancelled by this client")


async def _found(upstream: Upstream, name: str) -> ServedModel:
    try:
        return await upstream.find(name)
    except APIError as error:
        if error.status == 404:
            raise _Mismatch from None
        raise


def _is_same(model: ServedModel, other: ServedModel, adapter: str | None) -> bool:
    """Whether two Tritons serve the same checkpoint, and the same adapter, with the same version and limit."""
    facts = ("checkpoint_id", "version", "max_model_len")
    return (
        model.info.get("checkpoint_id") is not None
        and all(model.info.get(name) == other.info.get(name) for name in facts)
        and (adapter is None or (adapter in model.adapters and model.adapters[adapter] == other.adapters.get(adapter)))
    )
