"""Decides which requests of an engine process that died the next one gets, and which fail.  Pure Python.

A request can be the cause of a death, and its replay would then kill every engine.  So after a death the
requests that ran are *suspects*.  They are replayed group by group; the next group follows when each member
of the group has got past the point where it was, and is cleared by that.  If the engine dies before, the
group that was on probation is divided into eight, and these come last: first the requests that ran beside it, then the
groups that wait.  So all but the members of one group go on after each death as soon as an engine is up.

Groups are in the order of arrival, and the last of the eight is divided again, down to single requests: a request that
kills engines mostly does so early in its life.  If the newest one is to blame, all others have had a token by the time
it runs, in each engine.

A group that was on probation in an engine that died may kill the next one as well.  So it comes when all others have
had a few tokens from that (`risk_wait.py`), and they wait for one start of an engine, not for two.

A suspect that was the only one on probation in the last of more than `max_replays` deaths in a row without a new token
is tried alone, and fails if that engine dies, too.  The engine is emptied for this trial (`replay.py`); the others
return when the suspect has got past its point, or to the next engine.

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
        self._risky: set[int] = set()  # suspects that were on probation in an engine that died
        self._trials: set[int] = set()  # those of them that must run alone
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
    def is_risky(self) -> bool:
        """Whether the next suspects may well kill the engine."""
        return not self._probe and bool(self._groups) and self._next_group()[0] in self._risky

    @property
    def trial(self) -> int | None:
        """The suspect for which the engine must be emptied now; None while others come first."""
        if self._probe or self.holds_new or not self._groups:
            return None
        request_id = self._next_group()[0]
        return request_id if request_id in self._trials else None

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
        guilty, searching = self._guilty(ran), bool(self._probe)
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
        self._risky.update(request_id for request_id in probed if searching)
        if len(probed) == 1 and self._deaths[probed[0]] > self._max_replays:
            self._trials.update(probed)
            self._risky.update(probed)
        self._groups = deque(filter(None, (bystanders, *self._groups, late, *_parts(probed))))
        self._others = [number for number in dict.fromkeys([*self._others, *had]) if number not in known]
        return guilty

    def _guilty(self, ran: Mapping[int, set[int]]) -> dict[int, int]:
        known = len(ran) == 1 or not self._max_replays
        deaths = {request_id: self._deaths[request_id] for request_id in ran if known}
        return {request_id: count for request_id, count in deaths.items() if count > self._max_replays}

    def due(self, may_risk: bool) -> list[int]:
        """The requests to send to the engine now; call it after every change.

        Args:
            may_risk: the engine may die: the others have had their tokens.
        """
        group = self._ready_group(may_risk)
        if group:
            self._groups.remove(group)
            self._probe = {request_id: set(self._points[request_id]) for request_id in group}
        if self.holds_new:
            return group
        others, self._others = self._others, []
        return [*group, *others]

    def _ready_group(self, may_risk: bool) -> list[int]:
        if self._probe or not self._groups:
            return []
        if self._alone is not None:
            return [self._alone]
        group = self._next_group()
        waits = group[0] in self._trials or (group[0] in self._risky and not may_risk)
        return [] if waits else group

    def _next_group(self) -> list[int]:
        """The first one of the least dangerous kind."""
        return min(self._groups, key=lambda group: (group[0] in self._risky) + (group[0] in self._trials))

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
        self._risky.discard(request_id)
        self._trials.discard(request_id)
        if request_id == self._alone:
            self._alone = None


def _parts(group: list[int]) -> list[list[int]]:
    size = -(-len(group) // _PARTS)
    parts = [group[start : start + size] for start in range(0, len(group), size or 1)]
    return [*parts[:-1], *_parts(parts[-1])] if size > 1 else parts
