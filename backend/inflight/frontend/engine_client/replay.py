"""Sends the requests of an engine process that died to the next one.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from inflight.engine.messages import AddRequest, StepMessage
from inflight.frontend.engine_client.poison_search import PoisonSearch
from inflight.frontend.engine_client.risk_wait import RiskWait
from inflight.frontend.errors import RequestError

__all__ = ["Replay", "Resubmitter"]


class Resubmitter(Protocol):
    """The part of the supervisor that replays need."""

    def resubmit(self, requests: Iterable[AddRequest], hold_new: bool = False, settled: bool = True) -> None:
        """Send requests of an engine process that died.

        Args:
            hold_new: new requests wait until the next call.
            settled: no more of them will follow, and all suspects have got past the point of the death.
        """

    def recall(self, emptied: Callable[[], None]) -> set[int]:
        """Take all requests back from the engine, and return their ids; new ones wait until `resubmit`.

        Args:
            emptied: called, by any thread, once no more of their output follows; not called if the engine dies before.
        """


class _Stream(Protocol):
    """The part of `RequestState` that replays need."""

    request_id: int
    dropped: bool
    paused: bool

    @property
    def unfinished(self) -> list[int]: ...
    def rest(self) -> AddRequest | None: ...


class Replay:
    """Replays the requests of an engine process that died, until all of them run again.  Used by the sender thread.

    For the trial of a suspect it takes all other requests back from the engine, and submits the suspect when the engine
    has confirmed that it has dropped them.

    Args:
        engine: sends the replayed requests.
        streams: the open streams by id; owned by the sender thread.
        fail: ends a stream with an error; the last argument is one of `metric_specs.ENDINGS`.
        count: counts requests that are sent to another engine.
        max_replays: see `PoisonSearch`.
        behind_output: runs a function in the sender thread, behind all output that has arrived.
        later: runs a function in the sender thread after so many seconds.
    """

    def __init__(
        self,
        engine: Resubmitter,
        streams: Mapping[int, _Stream],
        fail: Callable[[int, RequestError, str], None],
        count: Callable[[int], None],
        max_replays: int,
        behind_output: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._fail = fail
        self._count = count
        self._max_replays = max_replays
        self._behind_output = behind_output
        self._poison_search = PoisonSearch(max_replays)
        self._wait = RiskWait(later)
        self._emptying: object | None = None  # the trial for which the engine is being emptied

    def engine_down(self, request_ids: Iterable[int], ran: Mapping[int, set[int]], cause: str) -> None:
        """An engine died; every delta that it had sent has been processed.

        Args:
            request_ids: the requests in it.
            ran: request id -> its sequences that ran, empty if unknown; no entries if nothing is known.
            cause: how it ended.
        """
        self._emptying = None
        self._wait.engine_down()
        streams = [self._streams[request_id] for request_id in sorted(request_ids) if request_id in self._streams]
        suspects = {}
        for stream in streams:
            if not ran:  # unknown: any of them may have run
                suspects[stream.request_id] = _running(stream, set())
            elif stream.request_id in ran:
                suspects[stream.request_id] = _running(stream, ran[stream.request_id])
        suspects = {request_id: indices for request_id, indices in suspects.items() if indices}
        guilty = self._poison_search.engine_down([stream.request_id for stream in streams], suspects)
        for request_id, deaths in guilty.items():
            times = "" if deaths == 1 else f", {deaths} times in a row"
            text = (
                f"the engine process died while it ran this request{times} ({cause}); "
                f"it is not replayed again (max_replays={self._max_replays})"
            )
            self._fail(request_id, RequestError("INTERNAL", text), "poison")
        self.submit_due()

    def engine_ready(self) -> None:
        """Another engine is up."""
        self._wait.engine_ready(self._go_on)

    def took(self, message: StepMessage) -> None:
        """A step has returned; call it for every step."""
        if not self._poison_search.active:
            return
        for delta in message.deltas:
            if delta.token_ids:
                self._poison_search.got_token(delta.request_id, delta.index)
                self._wait.got_tokens(delta)
        self.submit_due()

    def again(self, request: AddRequest) -> None:
        """Send a request again that the engine dropped for another reason than a death."""
        if self._emptying is not None or self._poison_search.holds_new:
            self._poison_search.park(request.request_id)
        elif not self._poison_search.keeps(request.request_id):  # else it was in the engine that died
            self._engine.resubmit([request], hold_new=False, settled=not self._poison_search.active)

    def ended(self, request_id: int) -> None:
        """A stream was closed."""
        if self._poison_search.active:
            self._wait.ended(request_id)
            self._poison_search.ended(request_id)
            if not self._poison_search.active:  # nothing is left to submit
                self._emptying = None
            self.submit_due()

    def submit_due(self) -> None:
        if self._emptying is not None:
            return
        requests: list[AddRequest] = []
        while due := self._poison_search.due(self._may_risk):
            for request_id in due:
                stream = self._streams.get(request_id)
                request = stream.rest() if stream is not None and not stream.dropped else None
                if stream is None or request is None:  # its end is queued
                    self._poison_search.ended(request_id)
                else:
                    stream.paused = False  # with an empty inbox
                    requests.append(request)
        self._count(len(requests))
        self._engine.resubmit(requests, self._poison_search.holds_new, settled=not self._poison_search.active)
        if self._poison_search.trial is not None and self._may_risk:
            self._begin_trial()

    @property
    def _may_risk(self) -> bool:
        return self._poison_search.is_risky and self._wait.is_over(self._others, self._go_on)

    def _others(self) -> set[int]:
        """The streams that the engine has, or soon will have."""
        streams = {stream.request_id for stream in self._streams.values() if not stream.paused}
        return streams - self._poison_search.waiting

    def _begin_trial(self) -> None:
        trial = self._emptying = object()
        recalled = self._engine.recall(lambda: self._behind_output(partial(self._emptied, trial)))
        self._poison_search.begin_trial(sorted(recalled))
        self._wait.restart()

    def _emptied(self, trial: object) -> None:
        """No more output of the recalled requests can arrive."""
        if trial is self._emptying:
            self._emptying = None
            self._go_on()

    def _go_on(self) -> None:
        if self._poison_search.active:
            self.submit_due()


def _running(stream: _Stream, indices: set[int]) -> set[int]:
    """Its sequences in `indices` that have not ended; if `indices` is empty, the first one that would run."""
    unfinished = stream.unfinished
    return indices.intersection(unfinished) if indices else set(unfinished[:1])
