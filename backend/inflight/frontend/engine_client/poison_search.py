"""Decides which requests of an engine process that died the next one gets, and which fail.  Pure Python.

A request can be the cause of a death, and its replay would then kill every engine.  So after a death the
requests that ran are *suspects*.  They are replayed group by group; the next group follows when each member
of the group has got past the point where it was.  If the engine dies before that, the group is halved.
A suspect that is left alone runs alone, and fails after more than `max_replays` deaths in a row without a
new token.

So a request that kills the engine at a certain token is found after about log2(suspects) + 2 deaths, and no
other request fails.  Group testing by halving is Hwang's (JASA 67, 1972).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

__all__ = ["PoisonSearch"]


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
        self._is_alone = False  # the probe was begun with one request
        self._others: list[int] = []  # neither suspects nor in an engine

    @property
    def active(self) -> bool:
        """Whether `due` returns requests, now or later."""
        return bool(self._probe or self._groups or self._others)

    @property
    def holds_new(self) -> bool:
        """Whether new requests must wait, because a suspect runs alone."""
        return bool(self._probe) and self._is_alone

    def engine_down(self, had: Iterable[int], ran: Mapping[int, set[int]]) -> dict[int, int]:
        """An engine died.

        Args:
            had: the requests in it.
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
        probed = [request_id for request_id in suspects if request_id in self._probe]
        bystanders = [request_id for request_id in suspects if request_id not in self._probe]
        late = [request_id for request_id in self._probe if request_id not in ran]  # had not run yet
        front, back = ([*_halves(probed), late], [bystanders]) if self._probe else (_halves(bystanders), [])
        self._probe.clear()
        self._groups = deque(group for group in (*front, *self._groups, *back) if group)
        known = {*guilty, *suspects, *late}
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
            found = self._groups.popleft()
            self._probe = {request_id: set(self._points[request_id]) for request_id in found}
            self._is_alone = len(found) == 1
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


def _halves(group: list[int]) -> list[list[int]]:
    middle = (len(group) + 1) // 2
    return [group[:middle], group[middle:]]
