"""Questions to the engine that wait for their answer.  No torch, no Triton."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from inflight.engine.messages import Answer, Ask, Question, encode
from inflight.frontend.errors import RequestError

__all__ = ["PendingQuestions"]


class PendingQuestions:
    """Each question is queued, then sent, then answered; it is forgotten when its future is done.

    Any thread can call any method.  Futures are resolved in the calling thread, outside of the lock;
    cancelling a future withdraws its question.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards the two below
        self._open: dict[int, Future[Any]] = {}
        self._queued: dict[int, bytes] = {}  # frames that were not sent yet

    @property
    def num_queued(self) -> int:
        """Questions that have not been sent."""
        return len(self._queued)

    @property
    def num_sent(self) -> int:
        """Questions that the engine has not answered."""
        with self._lock:
            return len(self._open) - len(self._queued)

    def add(self, question: Question) -> Future[Any]:
        """Queue a question."""
        future: Future[Any] = Future()
        question_id = next(self._ids)
        with self._lock:
            self._open[question_id] = future
            self._queued[question_id] = encode(Ask(question_id, question))
        future.add_done_callback(lambda _: self._forget(question_id))
        return future

    def take_frame(self) -> bytes | None:
        """The frame of the next queued question, which counts as sent from now on."""
        with self._lock:
            return self._queued.pop(next(iter(self._queued))) if self._queued else None

    def resolve(self, answer: Answer) -> None:
        """Resolve the future of an answered question; withdrawn questions are ignored."""
        with self._lock:
            future = self._open.pop(answer.question_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            code, message = answer.error
            future.set_exception(RequestError(code, message))  # type: ignore[arg-type]

    def fail_sent(self, error: RequestError) -> None:
        """The engine died: fail the questions that it was sent; queued ones wait for the next engine."""
        self._fail(error, lambda question_id: question_id not in self._queued)

    def fail_all(self, error: RequestError) -> None:
        """Fail all questions: no engine will answer."""
        self._fail(error, lambda question_id: True)

    def _fail(self, error: RequestError, concerns: Callable[[int], bool]) -> None:
        with self._lock:  # the thread that removes a future resolves it
            futures = [self._open.pop(question_id) for question_id in list(self._open) if concerns(question_id)]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _forget(self, question_id: int) -> None:
        with self._lock:
            self._open.pop(question_id, None)
            self._queued.pop(question_id, None)
