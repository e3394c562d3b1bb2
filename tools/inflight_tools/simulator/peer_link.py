"""KV on its way from one engine to another, on the virtual clock: what `kv_listen` and a tier of type "peer" do."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from inflight.config import ConfigError, parse_bytes
from inflight.engine.tiers.base import Frames, TornError
from inflight.runner.stores.peer_wire import seconds_for
from inflight_tools.simulator.kv_tier import CPU_SECONDS_PER_BYTE, Access, TaskClock, parse_latency
from inflight_tools.simulator.simulated_tiers import SimulatedTiers

__all__ = ["Link", "LinkSpec", "PeerOf", "Port", "parse_link"]

_ANSWER_SECONDS = 1.0  # in which the other engine must answer, beyond the time for the bytes
_COMING_SECONDS = 0.5  # for which the other engine lets a read wait for an extent that is still written
_REMEMBERED_SECONDS = 60.0


@dataclass(frozen=True)
class LinkSpec:
    """The network of a replica.

    Attributes:
        bytes_per_second: in each direction.
        latency: seconds of a question, and of a read without its bytes.
    """

    bytes_per_second: float
    latency: float

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:.3g} GB/s, {1e3 * self.latency:.3g} ms"


def parse_link(text: str) -> LinkSpec:
    """`RATE:LATENCY`, such as `1.25GB/s:0.2ms`.

    Raises:
        ConfigError: anything else.
    """
    rate, _, rest = (part.strip() for part in text.partition(":"))
    latency = parse_latency(rest)
    if not rate.endswith("/s") or latency is None:
        raise ConfigError(
            f"--handover-link {text!r}: expected RATE:LATENCY, bytes per second and a time in us, ms or s, such as "
            "1.25GB/s:0.2ms"
        )
    try:
        num_bytes = parse_bytes(rate.removesuffix("/s"))
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"--handover-link {text!r}: {error}") from None
    if not num_bytes:
        raise ConfigError(f"--handover-link {text!r}: the rate must be more than 0")
    return LinkSpec(float(num_bytes), latency)


class Link:
    """One direction of a machine's network.  It moves one extent at a time, so transfers that meet take turns.

    Steps of engines overlap, so extents are not asked for in the order of their times: each gets the first time
    that is free.

    Attributes:
        seconds: that it was busy.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._starts: list[float] = []  # of busy spans, ascending; they do not meet
        self._ends: list[float] = []

    def free_from(self, start: float, seconds: float) -> float:
        """The first time, not before `start`, from which it is free for so long."""
        index = bisect.bisect_right(self._ends, start)
        while index < len(self._starts) and self._starts[index] < start + seconds:
            start = self._ends[index]
            index += 1
        return start

    def take(self, start: float, seconds: float) -> None:
        """Be busy from a time on at which it is free for so long."""
        self.seconds += seconds
        index = bisect.bisect_right(self._starts, start)
        end = start + seconds
        if index and self._ends[index - 1] == start:  # the span before it grows
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
        old = bisect.bisect_left(self._ends, start - _REMEMBERED_SECONDS)
        del self._starts[:old], self._ends[:old]


def _free_from(links: Sequence[Link], start: float, seconds: float) -> float:
    """The first time from which all of them are free for so long."""
    begin = -math.inf
    while begin < start:
        begin = start
        for link in links:
            start = link.free_from(start, seconds)
    return start


class Port:
    """The host memory of a replica that computes prompts, as others read it; its engines come and go.

    Attributes:
        tiers: of the present engine; None: there never was one.
        num_bytes: sent.
    """

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self.link = Link()
        self.tiers: SimulatedTiers | None = None
        self.num_bytes = 0


class _Read(NamedTuple):
    """A read that has begun: how long it takes, whether that is too long, and the engine that is read."""

    seconds: float
    is_late: bool
    tiers: SimulatedTiers | None


class PeerOf:
    """Implements `Peer`: a port, read by the replica that has this link."""

    def __init__(self, port: Port, link: Link) -> None:
        self._port, self._link = port, link

    def access(self, clock: TaskClock, bytes_per_block: int) -> Access:
        return _PeerAccess(self._port, self._link, clock, bytes_per_block)


class _PeerAccess(Access):
    """Implements `KVStore`, as `PeerStore` does: what is written there soon is found, too, and a read waits for it."""

    num_bytes = 0

    def __init__(self, port: Port, link: Link, clock: TaskClock, bytes_per_block: int) -> None:
        self._port, self._link, self._clock, self._bytes_per_block = port, link, clock, bytes_per_block
        self._reads: dict[bytes, _Read] = {}
        self._latency = min(port.spec.latency, _ANSWER_SECONDS)  # of a question

    def begun(self, kind: str, args: tuple[Any, ...], start: float) -> tuple[float, tuple[Any, ...]]:
        if kind == "find":
            keys, behind = args
            answers = self._tiers(start) is not None
            return self._latency * (bool(keys) + bool(answers and behind(self._position(keys, start, False)))), args
        if kind == "write":
            return 0.0, args
        key, fill = args
        read = self._reads[key] = self._begun(key, self.bytes_asked(fill), start)
        return read.seconds, args

    def _begun(self, key: bytes, num_bytes: int, start: float) -> _Read:
        spec, tiers = self._port.spec, self._tiers(start)
        if tiers is None or tiers.host is None:
            return _Read(spec.latency, False, None)
        there = start if key in tiers.host.extents else tiers.coming(start).get(key, math.inf)
        if there > start + _COMING_SECONDS:
            return _Read(spec.latency + (0.0 if there == math.inf else _COMING_SECONDS), False, tiers)
        took, limit = num_bytes / spec.bytes_per_second, _ANSWER_SECONDS + seconds_for(num_bytes)
        links, asked = (self._port.link, self._link), there + spec.latency
        begin, until = _free_from(links, asked, min(took, limit)), asked + limit
        for link in links if begin < until else ():
            link.take(begin, min(took, until - begin))
        return _Read(min(begin + took, until) - start, begin + took > until, tiers)

    def find(self, keys: Sequence[bytes]) -> int:
        self._answered()
        return self._position(keys, self._clock(), False)

    def first_of(self, keys: Sequence[bytes]) -> int:
        self._answered()
        return self._position(keys, self._clock(), True)

    def _answered(self) -> None:
        self._clock.spend(self._latency)
        if self._latency < self._port.spec.latency:
            raise TimeoutError("no answer in time")

    def load(self, key: bytes, frames: Frames) -> bool:
        read = self._reads.pop(key)
        self._clock.spend(read.seconds)
        tiers = self._tiers(self._clock())
        if read.is_late:
            raise TimeoutError("no answer in time")
        if tiers is None or tiers is not read.tiers:
            raise ConnectionResetError("the engine there has ended meanwhile")
        kept = None if tiers.host is None else tiers.host.extents.get(key)
        if tiers.host is None or kept is None:
            return False
        seal, num_bytes = kept
        if num_bytes != self.bytes_of(frames[1:]):
            raise TornError(f"{num_bytes} bytes are kept, and other ones were expected")
        tiers.host.extents.move_to_end(key)
        tiers.served(num_bytes)
        self._port.num_bytes += num_bytes
        self._clock.spend(0.0, num_bytes * CPU_SECONDS_PER_BYTE)
        frames[0][:] = seal
        return True

    def store(self, key: bytes, frames: Frames) -> bool:
        return False

    def drop(self, key: bytes) -> None:
        """Nothing: it is the other engine's."""

    def _tiers(self, now: float) -> SimulatedTiers | None:
        """Those of the engine that answers then, with all that it has done by then; None: there is none."""
        tiers = self._port.tiers
        if tiers is None or not tiers.is_open:
            return None
        tiers.advance(now)
        return tiers

    def _position(self, keys: Sequence[bytes], now: float, is_there: bool) -> int:
        """Of the first key that is there or not; their number if there is none."""
        tiers = self._tiers(now)
        if tiers is None or tiers.host is None:
            raise ConnectionRefusedError("no engine answers")
        extents, coming = tiers.host.extents, tiers.coming(now)
        return next((n for n, key in enumerate(keys) if (key in extents or key in coming) is is_there), len(keys))
