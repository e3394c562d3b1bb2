"""Responses that are made, and wait to be sent.  No threads, no Triton."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from inflight.frontend.output.request_state import RequestState

__all__ = ["Outbox"]


class _Ready(NamedTuple):
    stream: RequestState
    sends: list[Callable[[], None]]
    seconds: float
    final: bool


class Outbox:
    """Responses are made several in a row, and then sent several in a row.

    Each send waits for the server, and other threads and processes use the core meanwhile.  Code that runs between two
    sends finds its data and instructions gone from the core's caches, and takes several times as long.

    Args:
        sent: called for each turn whose responses were sent: its stream, the seconds of making and of sending them, and
            whether they were the last ones.
        failed: called for a turn that could not be sent, and raises nothing.  What the outbox has of later turns of
            the stream is dropped before: it would follow a gap.
    """

    def __init__(
        self,
        sent: Callable[[RequestState, float, float, bool], None],
        failed: Callable[[RequestState, BaseException], None],
    ) -> None:
        self._sent = sent
        self._failed = failed
        self._ready: deque[_Ready] = deque()

    def add(self, stream: RequestState, sends: list[Callable[[], None]], seconds: float, final: bool) -> None:
        """The responses of a turn are made, which took `seconds`; `sends` send them.  `final`: no others follow."""
        self._ready.append(_Ready(stream, sends, seconds, final))

    def send_all(self) -> None:
        """Send what is here, in the order in which it came."""
        while self._ready:
            stream, sends, seconds, final = self._ready.popleft()
            if stream.closed:  # an earlier response of it was lost
                continue
            start = time.monotonic()
            try:
                for send in sends:
                    send()
                self._sent(stream, seconds, time.monotonic() - start, final)
            except BaseException as error:  # a lost client must end no other stream
                self._ready = deque(ready for ready in self._ready if ready.stream is not stream)
                self._failed(stream, error)
