"""Chooses the stream that the sender thread serves next.  No threads, no Triton."""

from __future__ import annotations

from collections import deque

from inflight.frontend.output.request_state import RequestState
from inflight.frontend.output.stream_scheduler import StreamScheduler

__all__ = ["SLICE", "SendQueue"]

# Seconds after which a stream's turn ends; it ends between two deltas.
SLICE = 0.002
# Seconds that a finished stream waits for others, so that the metrics are published once for all of them.
_GATHER_ENDS = 0.005


class SendQueue:
    """Streams with new output take turns; some wait until a response is due, and finished ones wait for the metrics."""

    def __init__(self) -> None:
        self._scheduler: StreamScheduler[RequestState] = StreamScheduler()
        self._held: deque[tuple[float, RequestState]] = (
            deque()
        )  # (due time, stream); waits are similar, so the order is about that of the due times
        self._ended: list[RequestState] = []

    def idle_seconds(self, now: float) -> float | None:
        """Seconds until a stream needs service; 0.0: now.  None: not before one is added."""
        if self._scheduler or self._ended:
            return 0.0
        return max(0.0, self._held[0][0] - now) if self._held else None

    @property
    def is_busy(self) -> bool:
        """Whether a stream needs service now; held streams do not count."""
        return bool(self._scheduler or self._ended)

    def add(self, stream: RequestState) -> None:
        """The stream has new output, or must end."""
        self._scheduler.add(stream)

    def hold(self, stream: RequestState, due: float) -> None:
        """Its output waits until `due`, unless a response is sent before."""
        if stream.due < due:
            stream.due = due
            self._held.append((due, stream))

    def finish(self, stream: RequestState) -> None:
        """It ended with its last token: its last response waits until the metrics include it."""
        self._ended.append(stream)

    def take_ended(self, now: float) -> list[RequestState]:
        """Finished streams, to be added again after their metrics are published; empty while more can arrive."""
        if not self._ended or (self._scheduler and now < (self._ended[0].end_time or 0.0) + _GATHER_ENDS):
            return []
        ended, self._ended = self._ended, []
        return ended

    def take(self, now: float) -> RequestState | None:
        """The stream to serve next; None if none is waiting."""
        while self._held and self._held[0][0] <= now:
            due, stream = self._held.popleft()
            if stream.due == due and not stream.closed:
                stream.early = 0.0
                self._scheduler.add(stream)
        return self._scheduler.take()

    def charge(self, stream: RequestState, seconds: float) -> None:
        """Its turn took `seconds`."""
        self._scheduler.charge(stream, seconds)

    def charge_more(self, stream: RequestState, seconds: float) -> None:
        """The responses of its turn took `seconds` to send."""
        self._scheduler.charge_more(stream, seconds)

    def forget(self, stream: RequestState) -> None:
        """It has ended."""
        self._scheduler.forget(stream)
