"""Servers behind a client whose answers break off where a test says so."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
from collections.abc import Iterator
from typing import Any

from inflight_client import (
    GenerationResult,
    RequestCancelledError,
    RetryPolicy,
    ServerUnreachableError,
    Stream,
)
from inflight_client.endpoints import Endpoints
from inflight_client.request import GenerationRequest
from inflight_client.wire import Columns

__all__ = ["EXPLICIT", "FAST", "LOST", "AsyncCluster", "Call", "Cluster", "answer", "request", "same"]

FAST = RetryPolicy(max_attempts=12, initial_delay=0.0, stall_timeout=0.05)
LOST = ServerUnreachableError("lost the connection to a")
EXPLICIT = {"prompt": "p", "request_id": "r1", "model": "m"}


class Cluster:
    """Servers that answer every request with the same output, token by token, and break off where told to.

    Args:
        output: the tokens of each sequence.
        breaks: of each attempt the responses before it fails, and how; None: the attempt answers nothing more.
    """

    def __init__(self, output: list[list[int]], breaks: list[tuple[int, Any]], count: int = 2) -> None:
        self.output, self.breaks = output, list(breaks)
        self.endpoints = Endpoints(count)
        self.opened: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.timeouts: list[float | None] = []
        self.watched: list[Stream] = []
        self.is_well = True
        self.speaks_ids = True

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> Call:
        self.opened.append(index)
        self.requests.append(request)
        self.timeouts.append(timeout)
        return Call(self._responses(request, *(self.breaks.pop(0) if self.breaks else (-1, None))))

    def _responses(self, request: GenerationRequest, limit: int, ending: Any) -> Iterator[Any]:
        given = request.resume_token_ids or [[] for _ in self.output]
        places = [len(all_) if some is None else len(some) for some, all_ in zip(given, self.output)]
        for some, all_ in zip(given, self.output):
            assert some is None or all_[: len(some)] == some
        sent = 0
        while sent != limit and (sent == 0 or any(p < len(o) for p, o in zip(places, self.output))):
            yield self._response(request, places)
            sent += 1
        if sent == limit:
            yield ending

    def _response(self, request: GenerationRequest, places: list[int]) -> Columns:
        new = [all_[place : place + 1] for all_, place in zip(self.output, places)]
        columns: Columns = {"text_output": [f"<{ids[0]}>" if ids else "" for ids in new], "num_input_tokens": [3]}
        if self.speaks_ids and request.return_token_ids:
            columns["token_ids"] = [token for ids in new for token in ids]
            columns["token_counts"] = [len(ids) for ids in new]
        if request.return_log_probs:
            width = max(map(len, new))
            columns["output_log_probs"] = [-1.0 / (ids[0] + 1) if ids else 0.0 for ids in new for _ in range(width)]
        # Added one by one, as by the server: since Python 3.12 `sum` rounds once, at the end.
        begun = request.resume_cumulative_logprob or [0.0] * len(new)
        given = request.resume_token_ids or [[] for _ in new]
        for index, ids in enumerate(new):
            places[index] += len(ids)
        if request.return_cumulative_logprob:
            columns["cumulative_logprob"] = [
                functools.reduce(operator.add, (-1.0 / (token + 1) for token in all_[len(some or []) : place]), start)
                if some is not None
                else start
                for start, some, all_, place in zip(begun, given, self.output, places)
            ]
        ends = [place == len(all_) for place, all_ in zip(places, self.output)]
        columns["finish_reason"] = ["length" if end else "None" for end in ends]
        return columns

    def address(self, index: int) -> str:
        return f"server-{index}"

    def responds(self, index: int, model: str) -> bool:
        return self.is_well

    def watch(self, stream: Stream) -> None:
        self.watched.append(stream)


class AsyncCluster(Cluster):
    async def responds(self, index: int, model: str) -> bool:  # type: ignore[override]
        return self.is_well


class Call:
    """An item that is an exception is raised; `threading.Event` is silence until the call is cancelled."""

    def __init__(self, script: Iterator[Any]) -> None:
        self.script = script
        self.cancelled = threading.Event()

    def __next__(self) -> Any:
        item = next(self.script)
        if item is threading.Event:
            assert self.cancelled.wait(20)
            raise RequestCancelledError("the request was cancelled by this client")
        if isinstance(item, Exception):
            raise item
        return item

    async def __anext__(self) -> Any:
        try:
            return await asyncio.to_thread(self._next)
        except _End:
            raise StopAsyncIteration from None

    def _next(self) -> Any:
        try:
            return self.__next__()
        except StopIteration:
            raise _End from None

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancelled.set()


class _End(Exception):
    pass


def request(**options: Any) -> GenerationRequest:
    return GenerationRequest.build("p", None, None, options, model="m", timeout=None)  # type: ignore[arg-type]


def answer(cluster: Cluster, policy: RetryPolicy = FAST, **options: Any) -> GenerationResult:
    stream = Stream(request(**options), policy, cluster)
    chunks = list(stream)
    result = stream.result()
    for index, choice in enumerate(result.choices):
        assert "".join(chunk.choices[index].text for chunk in chunks) == choice.text
    return result


def same(result: GenerationResult, other: GenerationResult) -> bool:
    return (result.choices, result.usage) == (other.choices, other.usage)
