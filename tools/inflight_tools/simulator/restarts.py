"""Carries out the incidents of a simulation: kills, drains, restarts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.fleet import Fleet, Replica, State
from inflight_tools.simulator.incidents import Incidents

__all__ = ["Restarts"]

_CLOSING_SECONDS = 5.0  # `Tiers.close`

_Action = Callable[[float], None]


class Restarts:
    """Kills and restarts replicas when it is time.

    Args:
        fleet: whose replicas.
        incidents: what happens, and when.
        at: has an action called at a time.
        move: sends requests elsewhere, whose engine is lost.
        house: called when a replica is ready again.

    Attributes:
        windows: spans (start, end) in which some replica was not ready or a rollout went on; the end of the last one is
            infinite while it lasts.
    """

    def __init__(
        self,
        fleet: Fleet,
        incidents: Incidents,
        at: Callable[[float, _Action], None],
        move: Callable[[list[int], SimulatedEngine, float], None],
        house: _Action,
    ) -> None:
        self._fleet, self._incidents = fleet, incidents
        self._at, self._move, self._house = at, move, house
        self._to_restart: deque[Replica] = deque()
        self.windows: list[tuple[float, float]] = []
        for kill in incidents.kills:
            at(kill.at, partial(self._kill, fleet.replicas[kill.replica]))
        if incidents.rollout is not None:
            at(incidents.rollout.at, self._roll_out)

    def disturbed_since(self, now: float) -> float:
        """Anything that began before this time overlaps a window: infinite within one, else the end of the last."""
        return self.windows[-1][1] if self.windows else -math.inf

    def drained(self, replica: Replica, now: float) -> None:
        """A draining replica has nothing left to do but to write what waits for its KV tiers."""
        replica.engine.pass_time(now + _CLOSING_SECONDS)
        self._stop(replica, now)

    def _kill(self, replica: Replica, now: float) -> None:
        if replica.state is not State.DOWN:
            self._stop(replica, now)

    def _roll_out(self, now: float) -> None:
        self._to_restart.extend(replica for replica in self._fleet.replicas if replica.state is State.READY)
        self._open_window(now)
        self._drain_next(now)

    def _drain_next(self, now: float) -> None:
        """Take out replicas while that many can be unavailable; replicas that died since the rollout began are new."""
        rollout = self._incidents.rollout
        while self._to_restart and rollout and self._fleet.unavailable < rollout.max_unavailable:
            replica = self._to_restart.popleft()
            self._fleet.drain(replica)
            if replica.open:
                self._at(now + rollout.grace, partial(self._out_of_grace, replica, replica.engine))
            else:
                self.drained(replica, now)

    def _out_of_grace(self, replica: Replica, engine: SimulatedEngine, now: float) -> None:
        if replica.engine is engine and replica.state is State.DRAINING:
            self._stop(replica, now)

    def _stop(self, replica: Replica, now: float) -> None:
        self._open_window(now)
        if replica in self._to_restart:
            self._to_restart.remove(replica)
        engine, lost = replica.engine, self._fleet.stop(replica)
        if self._incidents.startup < math.inf:
            self._at(now + self._incidents.startup, partial(self._start, replica))
        self._move(lost, engine, now)

    def _start(self, replica: Replica, now: float) -> None:
        self._fleet.start(replica, now)
        self._drain_next(now)
        if not self._fleet.unavailable:
            self.windows[-1] = (self.windows[-1][0], now)
        self._house(now)

    def _open_window(self, now: float) -> None:
        if not self.windows or self.windows[-1][1] < math.inf:
            self.windows.append((now, math.inf))
