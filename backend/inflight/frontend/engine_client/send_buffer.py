"""Requests and aborts that wait to be sent to the engine process, and the ids that it has.  No torch, no Triton."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from inflight.engine.messages import AbortRequest, AddRequest, encode

__all__ = ["SendBuffer"]


class SendBuffer:
    """Frames for one engine process after another.  Not thread-safe: the supervisor's lock guards it.

        add ----> new ------------+
        resubmit -> replayed -----+--> next_frame, then in the engine --> ended or aborted
                                                  |
        engine_down, recall: returned to the supervisor; new ones wait until `resubmit`

    Attributes:
        num_new: sequences of requests that no engine was sent.
        in_engine: ids of the requests that the engine has.
        recalled: ids of the requests taken back, which it may still run.
        paused: requests wait; aborts are sent.
    """

    def __init__(self) -> None:
        self.num_new = 0
        self.in_engine: set[int] = set()
        self.recalled: set[int] = set()
        self.paused = False
        self._new: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # frame, sequences
        self._replayed: OrderedDict[int, bytes] = OrderedDict()
        self._aborts: deque[bytes] = deque()
        self._holds_new = False

    @property
    def has_frames(self) -> bool:
        """Whether `next_frame` has one."""
        return bool(self._aborts or (not self.paused and (self._replayed or (self._new and not self._holds_new))))

    @property
    def holds_new(self) -> bool:
        """Whether new requests wait, even if an engine is up."""
        return self._holds_new or self.paused

    def add(self, request: AddRequest) -> None:
        """Queue a new request."""
        self._new[request.request_id] = encode(request), request.params.n
        self.num_new += request.params.n

    def resubmit(self, requests: Iterable[AddRequest], hold_new: bool) -> None:
        """Queue requests ahead of all new ones; `hold_new`: new ones wait until the next call."""
        for request in requests:
            self._replayed[request.request_id] = encode(request)
        self._holds_new = hold_new

    def abort(self, request_id: int, index: int | None) -> None:
        """Stop one sequence of a request, or all of them (`index` None); unknown ones are ignored."""
        if index is None:
            self._replayed.pop(request_id, None)
            if request_id in self._new:
                self.num_new -= self._new.pop(request_id)[1]
            self.recalled.discard(request_id)
        if request_id in self.in_engine:
            if index is None:
                self.in_engine.discard(request_id)
            self._aborts.append(encode(AbortRequest(request_id, index)))

    def next_abort(self) -> bytes | None:
        """The next frame of those to send before all others: aborts free memory that requests need."""
        return self._aborts.popleft() if self._aborts else None

    def next_request(self) -> bytes | None:
        """The next request's frame."""
        if self.paused:
            return None
        if self._replayed:
            request_id, frame = self._replayed.popitem(last=False)
        elif self._new and not self._holds_new:
            request_id, (frame, n) = self._new.popitem(last=False)
            self.num_new -= n
        else:
            return None
        self.in_engine.add(request_id)
        return frame

    def recall(self) -> set[int]:
        """Take all requests back from the engine, and the queued replayed ones; new ones wait until `resubmit`.

        Returns:
            Their ids.
        """
        self._aborts.extend(encode(AbortRequest(request_id, None)) for request_id in self.in_engine)
        self.recalled |= self.in_engine
        recalled = self.in_engine | set(self._replayed)
        self.in_engine = set()
        self._replayed.clear()
        self._holds_new = True
        return recalled

    def engine_down(self) -> set[int]:
        """The engine is gone.  Only questions are sent to the next one until `resubmit`.

        Returns:
            The requests that it had, and the queued replayed ones; while paused, the latter stay queued.
        """
        victims = self.in_engine | self.recalled
        self.in_engine, self.recalled = set(), set()
        if not self.paused:
            victims |= set(self._replayed)
            self._replayed.clear()
        self._aborts.clear()
        self._holds_new = True
        return victims

    def clear(self) -> list[int]:
        """Drop the queued requests, and return their ids."""
        waiting = [*self._replayed, *self._new]
        self._replayed.clear()
        self._new.clear()
        self.num_new = 0
        return waiting
