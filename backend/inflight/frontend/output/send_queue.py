"""Which stream the sender thread serves next.  No threads, no Triton."""

from __future__ import annotations

from collections import deque

from inflight.frontend.output.request_state import RequestState
from inflight.frontend.output.stream_scheduler import StreamScheduler

__all__ = ["SLICE", "SendQueue"]

# Seconds after which a stream's turn ends, between two deltas.
SLICE = 0.002
# Seconds that an end may wait for others, so that the metrics are published once for all of them.
_GATHER_ENDS = 0.005


class SendQueue:
    """Streams with news take turns; some wait until a response is due, and ends wait for the metrics."""

    def __init__(self) -> None:
        self._scheduler: StreamScheduler[RequestState] = StreamScheduler()
        self._held: deque[tuple[float, RequestState]] = deque()  # when due; waits are alike, so about in order
        self._ended: list[RequestState] = []

    def idle_seconds(self, now: float) -> float | None:
        """How long nobody needs service; 0.0: somebody does. None: until somebody is added."""
        if self._scheduler or self._ended:
            return 0.0
        return max(0.0, self._held[0][0] - now) if self._held else None

    @property
    def is_busy(self) -> bool:
        """Whether somebody needs service now, those aside that are held."""
        return bool(self._scheduler or self._ended)

    def add(self, stream: RequestState) -> None:
        """It has news, or an end."""
        self._scheduler.add(stream)

    def hold(self, stream: RequestState, due: float) -> None:
        """Its news wait until `due`, unless it is sent something before."""
        if stream.due < due:
            stream.due = due
            self._held.append((due, stream))

    def finish(self, stream: RequestState) -> None:
        """It ended by its last token: its last response waits until the metrics know."""
        self._ended.append(stream)

    def take_ended(self, now: float) -> list[RequestState]:
        """Streams to publish metrics for, after which they are added again; empty while others may join them."""
        if not self._ended or (self._scheduler and now < (self._ended[0].end_time or 0.0) + _GATHER_ENDS):
            return []
        ended, self._ended = self._ended, []
        return ended

    def take(self, now: float) -> RequestState | None:
        """Whose turn it is."""
        while self._held and self._held[0][0] <= now:
            due, stream = self._held.popleft()
            if stream.due == due and not stream.closed:
                self._scheduler.add(stream)
        return self._scheduler.take()

    def charge(self, stream: RequestState, seconds: float) -> None:
        """Its turn took so long."""
        self._scheduler.charge(stream, seconds)

    def forget(self, stream: RequestState) -> None:
        """It has ended."""
        self._scheduler.forget(stream)
