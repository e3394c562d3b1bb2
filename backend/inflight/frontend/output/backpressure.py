"""Pauses requests that generate tokens faster than they can be sent.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from inflight.engine.messages import AddRequest, GetStats, Question
from inflight.frontend.output.request_state import RequestState

__all__ = ["MAX_BACKLOG", "Backpressure"]

# Deltas in a stream's inbox, all sequences together.
MAX_BACKLOG = 2048


class _Engine(Protocol):
    def abort(self, request_id: int, index: int | None = None) -> None:
        """Stop all sequences of a request."""

    def ask(self, question: Question) -> Future[Any]:
        """Put a question to the engine."""


class Backpressure:
    """Bounds the inbox of every stream.  Used by the sender thread.

    A stream over the limit is aborted in the engine, which frees its blocks.  When its inbox is empty, it is
    submitted again with its output as known tokens, as after the death of an engine: it gets the same tokens.

    Deltas from before the abort can still arrive.  The engine answers a question that follows the abort after these
    deltas, so the request is not submitted again before that answer.

    Args:
        post: runs a function in the sender thread.
        resubmit: gives a request to the engine again.
        limit: maximum number of deltas in an inbox.
    """

    def __init__(
        self,
        engine: _Engine,
        post: Callable[[Callable[[], None]], None],
        resubmit: Callable[[AddRequest], None],
        limit: int = MAX_BACKLOG,
    ) -> None:
        self._engine = engine
        self._post = post
        self._resubmit = resubmit
        self._limit = limit

    def took(self, stream: RequestState) -> None:
        """A delta was added to the stream's inbox."""
        if stream.inbox.num_waiting > self._limit and not stream.paused and stream.last_act is None:
            stream.paused, stream.stopped = True, False
            self._engine.abort(stream.request_id)
            answer = self._engine.ask(GetStats())
            answer.add_done_callback(lambda _: self._post(partial(self._confirm, stream)))

    def _confirm(self, stream: RequestState) -> None:
        """No further delta of the stream can arrive: the engine has answered, or has died."""
        stream.stopped = True
        self.served(stream)

    def served(self, stream: RequestState) -> None:
        """The stream had its turn."""
        if not stream.paused or not stream.stopped or stream.inbox:
            return
        if stream.closed or stream.end_time is not None or stream.last_act is not None:
            return
        stream.paused = False
        request = stream.rest()
        if request is not None:
            self._resubmit(request)
