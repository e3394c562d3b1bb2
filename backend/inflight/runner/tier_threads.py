"""Threads that use a tier's store, or load adapters.  No torch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Full, Queue
from typing import Any

__all__ = ["TierThreads"]

_log = logging.getLogger(__name__)


class TierThreads:
    """Implements `Workers`.  They start with the first task, and are daemons: a store that hangs holds up no exit.

    Not at idle priority: on a busy machine, such a thread is stopped for up to a second while it has the interpreter's
    lock, and the engine's thread with it.

    Tasks raise nothing.  If one does, it is logged, its future has the error, and its thread goes on.
    """

    def __init__(self, count: int, name: str, most_tasks: int) -> None:
        self._tasks: Queue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = Queue(most_tasks)
        self._count, self._name, self._started = count, name, False
        self._is_closed = self._is_given_up = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._start()
        self._tasks.put((future, work, args))
        return future

    def offer(self, work: Callable[..., Any], *args: Any) -> bool:
        if self._is_closed:
            return False
        self._start()
        try:
            self._tasks.put_nowait((Future(), work, args))
        except Full:
            return False
        return True

    def finish(self, seconds: float) -> bool:
        """See `Workers`.  If not all tasks are done by then, the others are not begun: a thread ends after its task."""
        self._is_closed = True
        with self._tasks.all_tasks_done:
            done = self._tasks.all_tasks_done.wait_for(lambda: not self._tasks.unfinished_tasks, seconds)
        self._is_given_up = not done
        for _ in range(self._count if self._started else 0):
            with contextlib.suppress(Full):  # then no thread waits for a task
                self._tasks.put_nowait(None)
        return done

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for _ in range(self._count):
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """A function of its own: what a task refers to is large, and must not stay until the next one."""
        task = self._tasks.get()
        if task is None or self._is_given_up:
            return False
        future, work, args = task
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work(*args))
        except BaseException as error:
            _log.error("a task of the thread %r failed", self._name, exc_info=error)
            future.set_exception(error)
        finally:
            self._tasks.task_done()
        return True
