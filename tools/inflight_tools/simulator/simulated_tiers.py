"""The tiers of a simulated engine: the engine's own, on the virtual clock, over stores and other engines."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from inflight.engine.tiers.base import EngineTier, Read
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiers import Tiers
from inflight_tools.simulator.kv_tier import (
    CPU_SECONDS_PER_BYTE,
    Access,
    Engine,
    TaskClock,
    VirtualStore,
    VirtualWorkers,
)

__all__ = ["Peer", "SimulatedTiers"]


class VirtualBlocks:
    """Implements `KVBlocks` with a byte for each block."""

    def __init__(self, bytes_per_block: int) -> None:
        self.bytes_per_block = bytes_per_block

    def fill(self, blocks: Sequence[int], read: Read) -> bool:
        return read([memoryview(bytearray(len(blocks)))])

    def copy(self, blocks: Sequence[int]) -> memoryview:
        return memoryview(bytes(len(blocks)))

    def map_pages(self) -> None:
        pass


@dataclass
class _Tiers(Tiers):
    """The engine's own, which remember when an extent was noted: it is stored once its step has run.

    Attributes:
        noted: key -> when, at least of what waits to be stored.
    """

    noted: dict[bytes, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def missing_in(self, key: bytes, is_computed: bool) -> list[EngineTier]:
        self.noted[key] = self.clock()
        return super().missing_in(key, is_computed)


class Peer(Protocol):
    """Another engine, whose host memory can be read."""

    def access(self, clock: TaskClock, bytes_per_block: int) -> Access:
        """How an engine reads it that has this clock."""


class SimulatedTiers:
    """The tiers of a simulated engine.

    Args:
        engine: has the clock, which moves on while the engine waits for an answer.
        stores: the fastest first.
        peers: engines that are read, after all stores.
        on_cores: whether steps compute on the cores that the tiers' threads need, too.

    Attributes:
        tiers: as the engine core takes them.
        stores: of the first tiers, in their order.
        is_open: the engine lives, so others can read its host memory.
    """

    def __init__(
        self,
        engine: Engine,
        stores: Sequence[VirtualStore],
        bytes_per_block: int,
        peers: Sequence[Peer] = (),
        on_cores: bool = True,
    ) -> None:
        self.stores = stores
        self.is_open = True
        self._engine, self._clock, self._bytes_per_block = engine, TaskClock(engine), bytes_per_block
        self._workers: list[VirtualWorkers] = []
        self._host: tuple[VirtualStore, VirtualWorkers] | None = None
        self._charged = 0.0
        seal = Seal(bytes(16))
        self._tiers = [self._tier(store, seal) for store in stores]
        self._tiers += [
            self._made("peer", peer.access(self._clock, bytes_per_block), seal, "none")[0] for peer in peers
        ]
        self.tiers = _Tiers(self._tiers, VirtualBlocks(bytes_per_block), seal, self._clock, on_cores, clock=self._clock)

    def _tier(self, store: VirtualStore, seal: Seal) -> Tier:
        kind = store.spec.type
        tier, writes = self._made(kind, Access(store, self._clock, self._bytes_per_block), seal, "all")
        if kind == "host" and self._host is None:
            self._host = store, writes
        return tier

    def _made(
        self, name: str, access: Access, seal: Seal, keeps: Literal["all", "none"]
    ) -> tuple[Tier, VirtualWorkers]:
        """A tier, and the workers that write to it."""
        made: dict[str, VirtualWorkers] = {}

        def make(count: int, name: str, most: int) -> VirtualWorkers:
            kind = name.rpartition("-")[2]
            made[kind] = VirtualWorkers(self._engine, self._clock, access, count, kind, most)
            return made[kind]

        clock = self._clock
        tier = Tier(name, access, seal, make, keeps, clock, lambda: clock.cpu_seconds, is_shared=name != "host")
        made["find"].began = made["load"].began = tier._began
        self._workers += made.values()
        return tier, made["write"]

    @property
    def places(self) -> list[tuple[str, int, Tier, VirtualStore | None]]:
        """Type, number among those of the same type, tier, and its store; peers are one place, and have none."""
        count: Counter[str] = Counter()
        found: list[tuple[str, int, Tier, VirtualStore | None]] = []
        for index, tier in enumerate(self._tiers):
            store = self.stores[index] if index < len(self.stores) else None
            found.append((tier.name, count[tier.name], tier, store))
            count[tier.name] += store is not None
        return found

    @property
    def host(self) -> VirtualStore | None:
        """Its host memory, which other engines can read."""
        return None if self._host is None else self._host[0]

    def coming(self, until: float) -> dict[bytes, float]:
        """Extents that were on their way to its host memory by then, and when they are there."""
        if self._host is None:
            return {}
        store, writes = self._host
        num_bytes = self.tiers.extent_blocks * self._bytes_per_block
        ends = writes.ends(store.spec.latency + num_bytes / store.spec.bytes_per_second)
        former = self.tiers.noted
        noted = self.tiers.noted = {key: min(asked, former.get(key, asked)) for key, (asked, _) in ends.items()}
        return {key: end for key, (_, end) in ends.items() if noted[key] <= until}

    def served(self, num_bytes: int) -> None:
        """Another engine has read so much: sending it took a core, too."""
        self._clock.cpu_seconds += num_bytes * CPU_SECONDS_PER_BYTE

    def succeed(self, former: SimulatedTiers) -> None:
        """Take over the disk of a former engine."""
        for store, old in zip(self.stores, former.stores):
            if store.spec.type == "disk":
                store.extents, store.num_bytes = old.extents, old.num_bytes

    def advance(self, until: float) -> None:
        """Begin and end what is due by then."""
        for workers in self._workers:
            workers.advance(until)

    @property
    def next_end(self) -> float:
        """When the next task of a tier ends; infinite if none has begun."""
        return min((workers.next_end for workers in self._workers), default=math.inf)

    def cpu_seconds(self) -> float:
        """That tasks have taken from the cores of steps since the last call."""
        charged, self._charged = self._charged, self._clock.cpu_seconds
        return self._charged - charged if self.tiers.on_cores else 0.0
