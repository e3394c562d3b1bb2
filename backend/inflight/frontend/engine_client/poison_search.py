"""Decides which requests of an engine process that died the next one gets, and which fail.  Pure Python.

A request can be the cause of a death, and its replay would then kill every engine.  So after a death the
requests that ran are *suspects*.  They are replayed group by group; the next group follows when each member
of the group has got past the point where it was, and is cleared by that.  If the engine dies before, the
group that was on probation is divided into eight, and these come last: first the requests that ran beside it, then the
groups that wait.  So all but the members of one group go on after each death as soon as an engine is up.

Groups are in the order of arrival, and the last of the eight is divided again, down to single requests: a request that
kills engines mostly does so early in its life.  If the newest one is to blame, all others have had a token by the time
it runs, in each engine.

A suspect that was the only one on probation in the last of more than `max_replays` deaths in a row without a new token
is tried alone, and fails if that engine dies, too.  Its trial comes when all others have had a token: the engine is
emptied for it (`replay.py`), and the others return when it has got past its point, or to the next engine.  So they
wait for one start of an engine, not for two.

So a request that kills the engine at a certain token is found after about log8(suspects) + 2 deaths, at least 4 if
others ran beside it, and no other request fails.  One engine tests groups one after the other, so eight parts cost
no more engines than halves (Hwang, JASA 67, 1972), and need a third of the deaths.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping

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
        self._trials: set[int] = set()  # suspects in `_groups` or `_probe` that must run alone
        self._alone: int | None = None  # the one of them that has the engine, or for which it is being emptied
        self._others: list[int] = []  # neither suspects nor in an engine

    @property
    def active(self) -> bool:
        """Whether `due` returns requests, now or later."""
        return bool(self._probe or self._groups or self._others)

    @property
    def holds_new(self) -> bool:
        """Whether new requests must wait, because a suspect runs alone."""
        return self._alone is not None

    @property
    def trial(self) -> int | None:
        """The suspect to run alone next, once the others have had a token; None while other suspects come first."""
        if self._probe or self.holds_new or not self._groups or self._next_group() is not None:
            return None
        return self._groups[0][0]

    @property
    def waiting(self) -> set[int]:
        """The suspects whose turn has not come."""
        return {request_id for group in self._groups for request_id in group}

    def begin_trial(self, recalled: Iterable[int]) -> None:
        """The engine is emptied for `trial`: `due` returns it next, and `recalled`, the requests that it had, later."""
        self._alone = self.trial
        self._others += recalled

    def park(self, request_id: int) -> None:
        """A request that no engine has: `due` returns it when the trial is over."""
        if not self.keeps(request_id):
            self._others.append(request_id)

    def keeps(self, request_id: int) -> bool:
        """Whether `due` will return it."""
        return request_id in self._others or request_id in self.waiting

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
        if self._alone not in self._probe:
            self._alone = None
        if len(probed) == 1 and self._deaths[probed[0]] > self._max_replays:
            self._trials.add(probed[0])
        self._groups = deque(filter(None, (bystanders, *self._groups, late, *_parts(probed))))
        self._others = [number for number in dict.fromkeys([*self._others, *had]) if number not in known]
        return guilty

    def _guilty(self, ran: Mapping[int, set[int]]) -> dict[int, int]:
        known = len(ran) == 1 or not self._max_replays
        deaths = {request_id: self._deaths[request_id] for request_id in ran if known}
        return {request_id: count for request_id, count in deaths.items() if count > self._max_replays}

    def due(self) -> list[int]:
        """The requests to send to the engine now; call it after every change."""
        found: list[int] = []
        group = [self._alone] if self._alone is not None else self._next_group()
        if not self._probe and group is not None:
            self._groups.remove(group)
            self._probe = {request_id: set(self._points[request_id]) for request_id in group}
            found = group
        if not self.holds_new:
            found = [*found, *self._others]
            self._others = []
        return found

    def _next_group(self) -> list[int] | None:
        """The first group that runs beside others."""
        return next((group for group in self._groups if group[0] not in self._trials), None)

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
        self._trials.discard(request_id)
        if request_id == self._alone:
            self._alone = None


def _parts(group: list[int]) -> list[list[int]]:
    size = -(-len(group) // _PARTS)
    parts = [group[start : start + size] for start in range(0, len(group), size or 1)]
    return [*parts[:-1], *_parts(parts[-1])] if size > 1 else parts
