"""The replicas of a simulation: which are ready, what each has to do, and what their gauges say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from inflight.engine.deltas import StepStats
from inflight_tools.simulator.engine import SimulatedEngine

__all__ = ["Fleet", "Gauges", "Replica", "State"]


class State(Enum):
    """READY takes requests, DRAINING only ends those it has, DOWN has no engine that runs."""

    READY = 0
    DRAINING = 1
    DOWN = 2


class Gauges(NamedTuple):
    """The gauges of a replica after a step: requests that wait and run, and its KV blocks in use."""

    waiting: int = 0
    running: int = 0
    blocks: int = 0


@dataclass(slots=True)
class _Use:
    """KV blocks over the time of an engine's steps."""

    seconds: float = 0.0
    block_seconds: float = 0.0
    peak: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """A place in the fleet; a restart puts another engine into it.

    Attributes:
        open: numbers of the requests that it has.
        stepping: whether a step of the engine runs.
        former_busy: virtual seconds in which steps of its earlier engines ran.
    """

    index: int
    engine: SimulatedEngine
    state: State = State.READY
    open: set[int] = field(default_factory=set)
    gauges: Gauges = field(default_factory=Gauges)
    use: _Use = field(default_factory=_Use)
    stepping: bool = False
    former_busy: float = 0.0

    @property
    def busy(self) -> float:
        """Virtual seconds in which a step of its engines ran."""
        return self.former_busy + self.engine.busy

    @property
    def kv_use(self) -> tuple[float, float]:
        """Share of its engine's blocks in use: mean over the time of its steps, and maximum."""
        use, num_blocks = self.use, self.engine.pool.num_blocks
        mean = use.block_seconds / use.seconds if use.seconds else 0.0
        return mean / num_blocks, use.peak / num_blocks


class Fleet:
    """Replicas as a router sees them, and their totals over the whole simulation.

    Args:
        engines: idle engines, one per replica.
        successor: makes the engine of a replica that starts again.
        scrape_interval: seconds between two looks of the router at the gauges; 0: they are always current.
        prefills: make the engines of replicas that compute only prompts.  They come behind the others, and no router
            sees them.

    Attributes:
        ready: indices of the replicas that take requests, ascending.
        ready_prefills: the same of the replicas that compute only prompts.
        in_flight: requests that each replica has; the router knows them, since they go through it.
        scraped: the gauges of each replica when the router last looked.
        retired: engines that died or were restarted, with their KV use.
    """

    def __init__(
        self,
        engines: list[SimulatedEngine],
        successor: Callable[[], SimulatedEngine] | None = None,
        scrape_interval: float = 0.0,
        prefills: Sequence[Callable[[], SimulatedEngine]] = (),
    ) -> None:
        self._size, self._prefills = len(engines), prefills
        engines = [*engines, *(make() for make in prefills)]
        self.replicas = [Replica(index, engine) for index, engine in enumerate(engines)]
        self.ready = list(range(self._size))
        self.ready_prefills = list(range(self._size, len(engines)))
        self.in_flight = [0] * len(engines)
        self.scraped = [Gauges()] * len(engines)
        self.retired: list[tuple[SimulatedEngine, tuple[float, float]]] = []
        self._successor = successor
        self._has_tiers = any(engine.kv_tiers is not None for engine in engines)
        self._interval, self._next_scrape = scrape_interval, 0.0
        self._waiting, self._blocks = 0, 0
        self._since = self._waiting_seconds = self._block_seconds = self._ready_seconds = 0.0

    def __len__(self) -> int:
        """Replicas that a router chooses from."""
        return self._size

    @property
    def unavailable(self) -> int:
        """Replicas that take no requests."""
        return len(self.replicas) - len(self.ready) - len(self.ready_prefills)

    def is_prefill(self, replica: Replica) -> bool:
        """Whether it computes only prompts."""
        return replica.index >= self._size

    def look(self, now: float) -> None:
        """Call before anything changes at `now`: the router scrapes when it is time to.

        Nothing has changed since the last event, so what it sees now it would have seen when it was due.
        """
        if self._interval and now >= self._next_scrape:
            self.scraped = [replica.gauges for replica in self.replicas]
            self._next_scrape = (now // self._interval + 1) * self._interval

    def pass_time(self, until: float) -> None:
        """Let tiers read and write until then, also those of engines that have nothing to do."""
        if self._has_tiers:
            for replica in self.replicas:
                if replica.state is not State.DOWN:
                    replica.engine.pass_time(until)

    def report(self, replica: Replica, stats: StepStats, seconds: float) -> None:
        """A step of this replica has ended; it took `seconds`."""
        use = replica.use
        use.seconds += seconds
        use.block_seconds += seconds * stats.blocks_used
        use.peak = max(use.peak, stats.blocks_used)
        self._set(replica, Gauges(stats.waiting, stats.running, stats.blocks_used))

    def advance(self, now: float) -> None:
        """Add the time since the last call to the means of the gauges."""
        seconds, self._since = now - self._since, now
        self._waiting_seconds += seconds * self._waiting
        self._block_seconds += seconds * self._blocks
        self._ready_seconds += seconds * (len(self.ready) + len(self.ready_prefills))

    @property
    def mean_gauges(self) -> tuple[float, float]:
        """Waiting requests per ready replica, and the share of KV blocks in use, over the time that was added."""
        seconds = self._ready_seconds
        if not seconds:
            return 0.0, 0.0
        num_blocks = self.replicas[0].engine.pool.num_blocks
        return self._waiting_seconds / seconds, self._block_seconds / seconds / num_blocks

    def add(self, replica: Replica, number: int) -> None:
        """This replica has taken a request."""
        replica.open.add(number)
        self.in_flight[replica.index] += 1

    def remove(self, replica: Replica, number: int) -> None:
        """A request of this replica has ended."""
        replica.open.remove(number)
        self.in_flight[replica.index] -= 1

    def drain(self, replica: Replica) -> None:
        """Give it no more requests."""
        replica.state = State.DRAINING
        self._ready_of(replica).remove(replica.index)

    def stop(self, replica: Replica) -> list[int]:
        """End its engine at once; returns the numbers of the requests that it had, in order of arrival."""
        if replica.state is State.READY:
            self._ready_of(replica).remove(replica.index)
        replica.state, replica.stepping = State.DOWN, False
        replica.engine.end()
        self.retired.append((replica.engine, replica.kv_use))
        lost, replica.open = sorted(replica.open), set()
        self.in_flight[replica.index] = 0
        self._set(replica, Gauges())
        self.scraped[replica.index] = Gauges()
        return lost

    def start(self, replica: Replica, now: float) -> None:
        """Another engine takes its place: its pool is empty."""
        make = self._prefills[replica.index - self._size] if self.is_prefill(replica) else self._successor
        assert make is not None, "incidents need a maker of engines"
        engine = make()
        engine.succeed(replica.engine)
        replica.former_busy += replica.engine.busy
        replica.engine, replica.use, replica.state = engine, _Use(), State.READY
        replica.engine.now = now
        ready = self._ready_of(replica)
        ready.append(replica.index)
        ready.sort()

    def _ready_of(self, replica: Replica) -> list[int]:
        return self.ready_prefills if self.is_prefill(replica) else self.ready

    def _set(self, replica: Replica, gauges: Gauges) -> None:
        self._waiting += gauges.waiting - replica.gauges.waiting
        self._blocks += gauges.blocks - replica.gauges.blocks
        replica.gauges = gauges
        if not self._interval:
            self.scraped[replica.index] = gauges
