"""Routers choose the replica of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from inflight.config import ConfigError
from inflight_tools.simulator.engine import SimulatedEngine

__all__ = ["ROUTERS", "LeastLoaded", "PrefixAffinity", "RoundRobin", "Router", "make_router"]


class Router(Protocol):
    """Chooses by what a router outside the engines can see: the prompt and the load of each replica."""

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        """Index of the replica."""


class RoundRobin:
    """The replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        chosen, self._next = self._next % len(replicas), self._next + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest sequences, running or waiting; the first one of equals."""

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].load)


class PrefixAffinity:
    """The replica that got earlier prompts with the same prefix, whose blocks are in its cache.

    A new prefix goes to the least loaded replica and stays there.  It moves to the replica that is then
    least loaded when its own has more than `slack` times the mean load and more than `spare` sequences.

    Args:
        num_tokens: length of the prefix.
    """

    def __init__(self, num_tokens: int = 256, slack: float = 1.5, spare: int = 4) -> None:
        self._num_tokens, self._slack, self._spare = num_tokens, slack, spare
        self._home: dict[tuple[int, ...], int] = {}
        self._least = LeastLoaded()

    def choose(self, prompt: Sequence[int], replicas: Sequence[SimulatedEngine]) -> int:
        prefix = tuple(prompt[: self._num_tokens])
        home = self._home.get(prefix)
        if home is not None:
            mean = sum(replica.load for replica in replicas) / len(replicas)
            if replicas[home].load <= max(self._spare, self._slack * mean):
                return home
        self._home[prefix] = home = self._least.choose(prompt, replicas)
        return home


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}


def make_router(name: str) -> Router:
    """A router by name; raises ConfigError for an unknown one."""
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r}: must be one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
