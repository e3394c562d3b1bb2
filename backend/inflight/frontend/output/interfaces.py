"""What open streams need of the engine and of the metrics."""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import Future
from typing import Any, Protocol

from inflight.engine.messages import AddRequest, EngineReady, Question, StepMessage
from inflight.frontend.engine_client.replay import Resubmitter
from inflight.frontend.output.request_state import RequestState

__all__ = ["EngineClient", "StatsSink"]


class EngineClient(Resubmitter, Protocol):
    """The part of the supervisor that streams need.  Calls never block."""

    def submit(self, request: AddRequest) -> None:
        """Hand over a request; raises RequestError if it is refused."""

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Stop one sequence of a request, or all of them (`index` None); unknown ones are ignored."""

    def ask(self, question: Question) -> Future[Any]:
        """Put a question to the engine."""

    def release(self, request_id: int) -> None:
        """The request ended by itself."""


class StatsSink(Protocol):
    """Counts steps and requests for the metrics.  Calls are cheap; only `settle` communicates."""

    def step(self, message: StepMessage, received: float, open_ids: Container[int]) -> None: ...
    def engine_ready(self, ready: EngineReady, again: bool) -> None: ...
    def engine_down(self) -> None: ...
    def resubmitted(self, count: int) -> None: ...
    def first_token(self, stream: RequestState) -> None: ...
    def finished(self, stream: RequestState) -> None: ...
    def unsuccessful(self, ending: str, stream: RequestState | None = None) -> None: ...

    def settle(self) -> None:
        """Publish the counts of requests: an answer is about to be sent, and its client can read the metrics then."""
