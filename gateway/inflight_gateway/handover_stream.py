"""The stream of a request whose prompt one Triton computes, and whose answer another one continues."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
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

_SHARE = 1 / 3  # of the time that a request has left: a Triton for prompts gets no more of it

# A cancellation that races with the last response of its stream makes Triton keep the model when it is unloaded
# (docs/operations/triton-flaws.md), so an answer of at most so many tokens is read to its end, for at most so long.
_SHORT_TOKENS = 16
_SHORT_SECONDS = 5.0
_read_out: set[asyncio.Task[None]] = set()  # holds them until they end

# Refusals that tell nothing about other requests, in the backend's words: the queues of tenants and priority classes,
# and a request that waited for something of its own.
_OWN_REFUSAL = re.compile(r"the queue of |the request waited too long for ")


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

    @property
    def ahead(self) -> int:
        """Tokens of prompts before the next one; fewer than `queued` behind a name of several servers."""

    async def facts(self, model: str) -> ServedModel | None:
        """Its model of this name; None: it does not serve it."""

    def answered(self, model: str, adapter: str | None) -> None: ...

    def mismatched(self, model: str, adapter: str | None) -> None:
        """It serves something else under these names, or nothing."""

    def failed(self, why: str, retry_after: float | None = None) -> None:
        """It should get no requests for some seconds."""


class _Mismatch(Exception):
    """The Triton for prompts serves something else under the same name."""


# The chunk of the first token, and the request for the rest, None if that was all.  Without a chunk: the whole request.
_Begun = tuple[StreamChunk | None, GenerationRequest | None]


class HandoverStream:
    """As an `AsyncStream`, of two.

    The Triton for prompts gets the request as it is, and is left after the first token, so the rest is that of any
    stream that was interrupted there: `AsyncStream.rest`.  If it yields no token, the whole request goes to the others.

    Args:
        upstream: the Tritons that generate.
        request: of one sequence.
        prefills: Tritons for prompts, the next one for what those before it do not serve; none: measure what the prompt
            costs without.
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
        prefills: Sequence[Prefill],
        prompt: Prompt,
        costs: Costs,
        report: Callable[[Outcome], None],
        gap: Callable[[float], None],
    ) -> None:
        self.request = request
        self.pooled: Pooled | None = None
        self._upstream = upstream
        self._prefills = prefills
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
        first, rest = await self._begun()
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

    async def _begun(self) -> _Begun:
        if not self._prefills:
            return None, self.request
        self._check_cancelled()
        try:
            model = await self._upstream.find(self.request.model)
        except APIError:  # the others tell the caller, or return while the request waits for them
            return None, self.request
        outcome: Outcome = "mismatch"
        found: _Begun = None, self.request
        for prefill in self._prefills:
            self._check_cancelled()
            outcome, found = await self._prefilled(prefill, model)
            if outcome != "mismatch":
                break
        self._report(outcome)
        return found

    async def _prefilled(self, prefill: Prefill, model: ServedModel) -> tuple[Outcome, _Begun]:
        tokens, computed = prefill.ahead + self._prompt.tokens, self._prompt.tokens - self._prompt.cached
        limit, left = self._costs.patience(time.monotonic(), tokens), self._left()
        if left is not None:
            limit = min(limit, left * _SHARE)
        prefill.queued += computed
        self._stream = None
        outcome: Outcome
        try:
            found = await asyncio.wait_for(self._first_token(prefill, model), limit)
        except (asyncio.TimeoutError, DeadlineExceededError):
            outcome = "late"
            if self._stream is not None:  # it said what it serves, so it is well, and only slow
                self._costs.was_late(time.monotonic(), limit, tokens)
            prefill.failed(f"no token within {limit:.1f} s")
        except _Mismatch:
            outcome = "mismatch"
            prefill.mismatched(model.name, self.request.adapter)
        except InvalidRequestError:  # the other Triton says the same
            outcome = "refused"
            prefill.answered(model.name, self.request.adapter)
        except InflightError as error:
            self._check_cancelled()
            is_gone = not isinstance(error, UnavailableError) or isinstance(error, ServerUnreachableError)
            outcome = "failed" if is_gone else "refused"
            if _OWN_REFUSAL.match(error.message):
                prefill.answered(model.name, self.request.adapter)
            else:
                prefill.failed(error.message, error.retry_after if isinstance(error, UnavailableError) else None)
        else:
            prefill.answered(model.name, self.request.adapter)
            if self._stream is not None and _is_short(self.request):
                _begin_to_read_out(self._stream)
                self._stream = None
            return "ended" if found[1] is None else "handed_over", found
        finally:
            prefill.queued -= computed
            if self._stream is not None:
                self._stream.cancel()
        return outcome, (None, self.request)

    async def _first_token(self, prefill: Prefill, model: ServedModel) -> _Begun:
        theirs = await prefill.facts(model.name)
        if theirs is None or not _is_same(model, theirs, self.request.adapter):
            raise _Mismatch
        self._check_cancelled()
        sent, says_checkpoint = time.monotonic(), _says_checkpoint(theirs)
        asked = self.request.changed(stream=True, timeout=self._left(), return_checkpoint_id=says_checkpoint)
        self._stream = stream = prefill.upstream.send(asked)
        async for chunk in stream:
            if not chunk.choices[0].num_tokens and chunk.finish_reason is None:
                continue
            took = time.monotonic() - sent
            if chunk.finish_reason is not None:  # a cancellation could race with the last response
                with contextlib.suppress(InflightError):  # the answer is complete
                    async for _ in stream:
                        pass
                self._stream = None
            if says_checkpoint and chunk.checkpoint_id != model.info["checkpoint_id"]:
                raise _Mismatch  # it was loaded since it told what it serves
            rest = stream.rest().changed(return_checkpoint_id=False)
            if chunk.finish_reason is None:
                if rest.resume_token_ids is None:  # nothing that another server can continue
                    raise _Mismatch
                if self.request.adapter is not None and rest.adapter_digest != model.adapters.get(self.request.adapter):
                    raise _Mismatch
            computed = (chunk.num_input_tokens or self._prompt.tokens) - (chunk.num_cached_tokens or 0)
            if computed >= LEAST_TOKENS:
                self._costs.prefill.add(time.monotonic(), took / computed)
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


def _is_short(request: GenerationRequest) -> bool:
    """Whether its answer has at most `_SHORT_TOKENS`; yes without a limit, since 16 is the engine's default."""
    limit = request.sampling.get("max_tokens")
    return limit is None or (str(limit).isdecimal() and int(limit) <= _SHORT_TOKENS)


def _begin_to_read_out(stream: AnyStream) -> None:
    task = asyncio.create_task(_read_to_end(stream))
    _read_out.add(task)
    task.add_done_callback(_read_out.discard)


async def _read_to_end(stream: AnyStream) -> None:
    """Read the rest, which no client gets, and cancel after `_SHORT_SECONDS`."""

    async def read() -> None:
        with contextlib.suppress(InflightError):  # the other Triton has the rest
            async for _ in stream:
                pass

    try:
        await asyncio.wait_for(read(), _SHORT_SECONDS)
    except asyncio.TimeoutError:
        stream.cancel()


def _says_checkpoint(model: ServedModel) -> bool:
    """Whether each of its responses can name its checkpoint.

    A Triton refuses an input that its `config.pbtxt` does not list, such as one of an older release.
    """
    return "return_checkpoint_id" in model.inputs and "checkpoint_id" in model.outputs


def _is_same(model: ServedModel, other: ServedModel, adapter: str | None) -> bool:
    """Whether another Triton serves the same checkpoint, and the same adapter, with the same version and limit."""
    facts = ("checkpoint_id", "version", "max_model_len")
    return (
        model.info.get("checkpoint_id") is not None
        and all(model.info.get(name) == other.info.get(name) for name in facts)
        and (adapter is None or (adapter in model.adapters and model.adapters[adapter] == other.adapters.get(adapter)))
    )
