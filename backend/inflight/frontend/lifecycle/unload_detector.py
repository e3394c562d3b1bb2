"""Detects that a model instance is about to be unloaded; Triton does not tell its stub.

Three signs start the drain:

- SIGTERM or SIGINT to this process: from `inflight serve`, from a terminal or a service manager that signals every
  process of the server, or from a successor.  Triton's stub ignores both.
- The server reports that the model is no longer ready: it is being unloaded, or the server is stopping.  Triton
  finalizes an instance only after its last request, so the server is asked periodically while requests are open.
- A reload: at its first request, the new instance sends SIGTERM to the instance that it replaces.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable

from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.lifecycle.instance_registry import RegistryEntry

__all__ = ["UnloadDetector"]

_PERIOD_SECONDS = 0.5
_REFUSALS = 3  # in a row: a busy server can reset a connection


class UnloadDetector:
    """A thread that waits for the signs.  Create and stop it in the main thread of the process.

    Args:
        entry: this instance's; a successor finds the instance by it.
        num_open: number of open requests.
        can_serve: whether this instance itself reports that it is ready.
        is_ready: asks the server whether the model is ready; None: unknown.  Called while requests are open, and a few
            times before the first one: it must find the server's address before the server stops.
    """

    def __init__(
        self,
        drain: Drain,
        entry: RegistryEntry,
        num_open: Callable[[], int],
        can_serve: Callable[[], bool],
        is_ready: Callable[[], bool | None],
    ) -> None:
        self._drain = drain
        self._entry = entry
        self._num_open = num_open
        self._can_serve = can_serve
        self._is_ready = is_ready
        self._served = False
        self._refusals = 0  # in a row
        self._idle_looks = 0
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._loop, name="unload-detector", daemon=True)

    def start(self) -> None:
        """Install the handlers: Python's C code writes signal numbers to the pipe at once, even if threads are busy."""
        with contextlib.suppress(ValueError):  # not the main thread: no signals
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda signum, frame: None)
            signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        os.close(self._write_fd)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._read_fd)

    def _loop(self) -> None:
        while True:
            readable, _, _ = select.select([self._read_fd], [], [], _PERIOD_SECONDS)
            if readable:
                numbers = os.read(self._read_fd, 64)
                if not numbers:
                    return
                if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                    self._begin(signal.Signals(numbers[0]).name)
            elif self._num_open() and not self._drain.draining:
                self._look()
            elif not self._served:
                self._idle_looks += 1
                if self._idle_looks & (self._idle_looks - 1) == 0:  # at growing intervals
                    self._is_ready()

    def _look(self) -> None:
        if not self._served:  # the first request: this instance serves now
            self._served = True
            for pid in self._entry.predecessors():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        # Newer servers ask the instance itself.  Its own "no" while the engine is down is no sign of an unload.
        ready = self._is_ready() if self._can_serve() else True
        if ready is None:
            return  # unknown
        self._refusals = 0 if ready or not self._can_serve() else self._refusals + 1
        if self._refusals == _REFUSALS:
            self._begin("the server is unloading the model or stopping")

    def _begin(self, cause: str) -> None:
        self._drain.begin(cause)
