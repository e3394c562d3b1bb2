"""Decides which requests of an engine process that died the next one gets, and which fail.  Pure Python.

A request can be the cause of a death, and its replay would then kill every engine.  So after a death the
requests that ran are *suspects*.  They are replayed group by group; the next group follows when each member
of the group has got past the point where it was, and is cleared by that.  If the engine dies before, the
group that was on probation is divided into eight, and these come last: first the requests that ran beside it, then the
groups that wait.  So all but the members of one group go on after each death as soon as an engine is up.

A suspect that was the only one on probation in the last of more than `max_replays` deaths in a row without a new token
runs alone next, and fails if that engine dies, too.

So a request that kills the engine at a certain token is found after about log8(suspects) + 2 deaths, at least 4 if
others ran beside it, and no other request fails.  One engine tests groups one after the other, so eight parts cost
no more engines than halves (Hwang, JASA 67, 1972), and need a third of the deaths.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

__all__ = ["PoisonSearch"]

_PARTS = 8  # of a group that was on probation when the engine died


class PoisonSearch:
    """The requests of a frontend that must be replayed, by id.

    Args:
        max_replays: deaths in a row that a request can be the only possible cause of before it fails; with 0 every
            request that ran when an engine died fails.
    """

    def __init__(self, max_replays: int) -> None:
        self._max_replays = max_replays
        self._deaths: Counter[int] = Counter()  # in a row; request id -> deaths that it may have caused
        self._points: dict[int, set[int]] = {}  # a suspect's sequences that ran when the engine died
        self._groups: deque[list[int]] = deque()  # wait for the end of the probe
        self._probe: dict[int, set[int]] = {}  # the group in the engine: sequences without a token so far
        self._on_trial: int | None = None  # the suspect that runs next, alone
        self._others: list[int] = []  # neither suspects nor in an engine

    @property
    def active(self) -> bool:
        """Whether `due` returns requests, now or later."""
        return bool(self._probe or self._groups or self._others)

    @property
    def holds_new(self) -> bool:
        """Whether new requests must wait, because a suspect runs alone."""
        return self._on_trial is not None

    def engine_down(self, had: Collection[int], ran: Mapping[int, set[int]]) -> dict[int, int]:
        """An engine died.

        Args:
            had: the requests in it; those of the group on probation that are not among them are still to be sent to
                the next one.
            ran: the requests that may have killed it, with their sequences that ran.

        Returns:
            The requests that fail, and the deaths in a row without a token that each may have caused.
        """
        self._points.update({request_id: set(indices) for request_id, indices in ran.items()})
        self._deaths.update(ran.keys())
        guilty = self._guilty(ran)
        for request_id in guilty:
            self._forget(request_id)
        suspects = [request_id for request_id in ran if request_id not in guilty]
        probed = [request_id for request_id in suspects if request_id in self._probe or not self._probe]
        bystanders = [request_id for request_id in suspects if request_id not in probed]
        late = [request_id for request_id in self._probe if request_id not in ran and request_id in had]
        known = {*guilty, *suspects, *late}
        self._probe = {request_id: missing for request_id, missing in self._probe.items() if request_id not in had}
        self._on_trial = None
        if len(probed) == 1 and self._deaths[probed[0]] > self._max_replays:
            self._on_trial = probed[0]
        self._groups = deque(filter(None, (bystanders, *self._groups, late, *_parts(probed))))
        self._others += [request_id for request_id in had if request_id not in known]
        return guilty

    def _guilty(self, ran: Mapping[int, set[int]]) -> dict[int, int]:
        known = len(ran) == 1 or not self._max_replays
        deaths = {request_id: self._deaths[request_id] for request_id in ran if known}
        return {request_id: count for request_id, count in deaths.items() if count > self._max_replays}

    def due(self) -> list[int]:
        """The requests to send to the engine now; call it after every change."""
        found: list[int] = []
        if not self._probe and self._groups:
            if self._on_trial is not None:
                self._groups.remove([self._on_trial])
                self._groups.appendleft([self._on_trial])
            found = self._groups.popleft()
            self._probe = {request_id: set(self._points[request_id]) for request_id in found}
        if not self.holds_new:
            found = [*found, *self._others]
            self._others = []
        return found

    def got_token(self, request_id: int, index: int) -> None:
        """A sequence got a token."""
        missing = self._probe.get(request_id)
        if missing is not None:
            missing.discard(index)
            if not missing:  # it got past the point where it was
                del self._probe[request_id]
                self._acquit(request_id)

    def ended(self, request_id: int) -> None:
        """A request ended, for any reason: it is not replayed."""
        if self.active:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        self._probe.pop(request_id, None)
        for group in (self._others, *self._groups):
            if request_id in group:
                group.remove(request_id)
        self._groups = deque(filter(None, self._groups))
        self._acquit(request_id)

    def _acquit(self, request_id: int) -> None:
        self._points.pop(request_id, None)
        del self._deaths[request_id]
        if request_id == self._on_trial:
            self._on_trial = None


def _parts(group: list[int]) -> list[list[int]]:
    size = -(-len(group) // _PARTS)
    return [group[start : start + size] for start in range(0, len(group), size or 1)]
