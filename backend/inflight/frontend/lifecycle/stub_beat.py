"""Signs of life of a model instance, for the launcher that watches its stub.

A stub that is stopped or hangs keeps its streams open and sends nothing, and Triton reports its model as ready.  A beat
goes the way of every response, through the sender thread: it stops if the process is stopped, if Python's lock is never
released, and if the thread hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["BEAT_SECONDS", "STUB_TIMEOUT", "StubBeat"]

BEAT_SECONDS = 1.0
STUB_TIMEOUT = 30.0  # seconds without a beat; as long as clients wait before they go to another server


class StubBeat:
    """A thread that has a beat published every second.

    Args:
        publish: publishes one beat.
        run_in_sender: runs a function in the sender thread, later.
        seconds: from one beat to the next.
    """

    def __init__(
        self,
        publish: Callable[[], None],
        run_in_sender: Callable[[Callable[[], None]], None],
        seconds: float = BEAT_SECONDS,
    ) -> None:
        self._publish = publish
        self._run_in_sender = run_in_sender
        self._seconds = seconds
        self._stopped = threading.Event()
        self._on_its_way = False
        self._thread = threading.Thread(target=self._loop, name="stub-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a beat that is on its way is still published."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            if not self._on_its_way:  # a sender that hangs has one beat in its queue, not one a second
                self._on_its_way = True
                self._run_in_sender(self._beat)

    def _beat(self) -> None:
        self._on_its_way = False
        self._publish()
