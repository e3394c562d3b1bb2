"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from inflight.config import ConfigError
from inflight_tools.simulator.engine import SimulatedEngine

__all__ = ["ROUTERS", "LeastLoaded", "PrefixAffinity", "RoundRobin", "Router", "make_router"]


class Router(Protocol):
    """Chooses from what a router outside of the engines can see: the prompt, and who has how many requests."""

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        """Index of the replica."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        chosen, self._next = self._next % len(replicas), self._next + 1
        return chosen


class LeastLoaded:
    """Whoever has the fewest sequences, running and waiting; of equals the first."""

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].load)


class PrefixAffinity:
    """Where prompts with this beginning went before, so that its blocks are in that replica's cache.

    A beginning that is new goes to the least loaded replica, and so does one whose replica has `slack`
    times the mean load and more than `spare` sequences: from then on it is at home there.

    Args:
        num_tokens: length of a prompt's beginning.
    """

    def __init__(self, num_tokens: int = 256, slack: float = 1.5, spare: int = 4) -> None:
        self._num_tokens, self._slack, self._spare = num_tokens, slack, spare
        self._home: dict[tuple[int, ...], int] = {}
        self._least = LeastLoaded()

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        beginning = tuple(prompt[: self._num_tokens])
        home = self._home.get(beginning)
        if home is not None:
            mean = sum(replica.load for replica in replicas) / len(replicas)
            if replicas[home].load <= max(self._spare, self._slack * mean):
                return home
        self._home[beginning] = home = self._least.choose(prompt, replicas)
        return home


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}


def make_router(name: str) -> Router:
    """Raises ConfigError where there is no router of that name."""
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r}: allowed are {', '.join(ROUTERS)}")
    return ROUTERS[name]()
