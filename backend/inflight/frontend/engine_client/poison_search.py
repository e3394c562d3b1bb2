"""Which requests an engine process is given after the one before it died, and which are given up.  Pure Python.

A request may be what kills the engine, and replaying it would then kill every engine.  So after a death
those that ran are *suspects*: they are replayed group by group, and a group is followed by the next one
once each of its members got past the point where it was.  If the engine dies before that, the group is
halved.  A suspect that is left alone runs alone, and fails once it has died more often than `max_replays`
without getting any further.

A request that kills the engine whenever it comes to a certain token is so found after about
log2(suspects) + 2 deaths, and no other request fails.  Group testing by halving is Hwang's (JASA 67, 1972).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

__all__ = ["PoisonSearch"]


class PoisonSearch:
    """The requests of a frontend that must be replayed, by id.

    Args:
        max_replays: deaths in a row that a request may be the only possible cause of; with 0 whatever ran when an
            engine died is given up.
    """

    def __init__(self, max_replays: int) -> None:
        self._max_replays = max_replays
        self._deaths: Counter[int] = Counter()  # in a row, of those that may have caused them
        self._points: dict[int, set[int]] = {}  # a suspect's sequences that ran when the engine died
        self._groups: deque[list[int]] = deque()  # wait until the probe has passed
        self._probe: dict[int, set[int]] = {}  # in the engine: the sequences that got no token there yet
        self._is_alone = False  # the probe was begun with one request
        self._others: list[int] = []  # no suspects, and in no engine

    @property
    def active(self) -> bool:
        """Whether `due` has, or will have, requests to give."""
        return bool(self._probe or self._groups or self._others)

    @property
    def holds_new(self) -> bool:
        """Whether new requests must wait, because a suspect runs alone."""
        return bool(self._probe) and self._is_alone

    def engine_down(self, had: Iterable[int], ran: Mapping[int, set[int]]) -> dict[int, int]:
        """An engine died.

        Args:
            had: the requests in it.
            ran: those that may have killed it, and which of their sequences.

        Returns:
            The requests to give up, and the deaths in a row that each has seen without a token between them.
        """
        self._points.update({request_id: set(indices) for request_id, indices in ran.items()})
        self._deaths.update(ran.keys())
        guilty = self._guilty(ran)
        for request_id in guilty:
            self._forget(request_id)
        suspects = [request_id for request_id in ran if request_id not in guilty]
        probed = [request_id for request_id in suspects if request_id in self._probe]
        bystanders = [request_id for request_id in suspects if request_id not in self._probe]
        late = [request_id for request_id in self._probe if request_id not in ran]  # did not run yet
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
        """The requests to give to the engine now; call it after every change."""
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
            if not missing:  # it got past the point, whatever it was
                del self._probe[request_id]
                self._acquit(request_id)

    def ended(self, request_id: int) -> None:
        """A request ended, however: nothing is to be replayed of it."""
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
