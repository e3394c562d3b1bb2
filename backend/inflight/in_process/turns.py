"""Threads take turns at an engine that is not made for several, and an interrupt waits for the end of a turn."""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any

__all__ = ["InterruptLater", "TurnLock"]

# Between two looks at signals: one that arrives between the last look and the wait itself does not end the wait.
_LOOK_SECONDS = 0.5


class TurnLock:
    """A lock that goes to the thread that has waited longest.

    A thread that steps an engine gives its lock back and takes it again at once; `threading.Lock` would let it, and the
    others would wait for ever.  A thread that still holds the lock takes it again: an exception of a signal handler can
    reach `__exit__` before its first line.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        gate = threading.Lock()
        gate.acquire()
        try:
            with self._mutex:
                if self._owner in (None, me):
                    self._owner = me
                    return
                self._waiting.append((me, gate))
            while self._owner != me:
                gate.acquire(timeout=_LOOK_SECONDS)
            self._leave_queue(me, gate)
        except BaseException:  # an interrupt: the turn goes to the next thread
            self._leave_queue(me, gate)
            if self._owner == me:
                self.__exit__()
            raise

    def __exit__(self, *exception: Any) -> None:
        with self._mutex:
            if self._waiting:
                self._owner, gate = self._waiting[0]  # it leaves the queue itself: an interrupt here loses no thread
                gate.release()
            else:
                self._owner = None

    def _leave_queue(self, thread: int, gate: threading.Lock) -> None:
        with self._mutex:
            if (thread, gate) in self._waiting:
                self._waiting.remove((thread, gate))


class InterruptLater:
    """Postpones the SIGINT (Ctrl-C) that arrives within the `with` block to its end; a second one takes effect at once.

    Only Python's main thread receives signals; in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        unfinished = getattr(handler, "__self__", None)  # one whose `__exit__` an exception has cut short
        if isinstance(unfinished, InterruptLater):
            handler = unfinished._handler
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._receive)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._received is not None:
                self._handler(*self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number, frame
            return
        self._received = None
        self._handler(number, frame)
