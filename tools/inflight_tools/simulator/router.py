"""Routers choose the replica of a request."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from inflight.config import ConfigError
from inflight_tools.simulator.fleet import Fleet

if TYPE_CHECKING:
    from inflight_gateway.affinity import BoundedRing

__all__ = ["ROUTERS", "LeastLoaded", "LeastWaiting", "PrefixAffinity", "RoundRobin", "Router", "make_router"]

_BLOCK = 16  # tokens; to the gateway, a shorter prompt has no prefix


class Router(Protocol):
    """Chooses by what a router outside the engines can see.

    That is the prompt, which replicas are ready, the requests that it has sent to each, and gauges as old as its last
    scrape.
    """

    def choose(self, prompt: Sequence[int], fleet: Fleet) -> int:
        """Index of a ready replica; there is at least one."""


class RoundRobin:
    """The ready replicas in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, prompt: Sequence[int], fleet: Fleet) -> int:
        self._last = next((index for index in fleet.ready if index > self._last), fleet.ready[0])
        return self._last


class LeastLoaded:
    """The replica with the fewest requests that this router sent to it and that have not ended; the first of equals."""

    def choose(self, prompt: Sequence[int], fleet: Fleet) -> int:
        return min(fleet.ready, key=fleet.in_flight.__getitem__)


class LeastWaiting:
    """The replica whose gauges show the fewest waiting requests, then the fewest running ones; any of equals.

    This is all that a router knows that shares the fleet with others.  Until the next scrape it sends everything to the
    replicas that were least busy at the last one.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: Sequence[int], fleet: Fleet) -> int:
        scraped = fleet.scraped
        least = min(scraped[index][:2] for index in fleet.ready)
        return self._random.choice([index for index in fleet.ready if scraped[index][:2] == least])


class PrefixAffinity:
    """The replica that has the prefix in its cache: consistent hashing with bounded loads, by the gateway's own code.

    A prompt without a full block goes to the replica with the fewest requests.

    Args:
        num_tokens: length of the prefix that is hashed.
        load_factor: a replica is passed over that has this multiple of the mean number of requests.
    """

    def __init__(self, num_tokens: int = 256, load_factor: float = 1.25) -> None:
        self._num_tokens, self._load_factor = num_tokens, load_factor
        self._ring: BoundedRing | None = None
        self._least = LeastLoaded()

    def choose(self, prompt: Sequence[int], fleet: Fleet) -> int:
        from inflight_gateway.affinity import key_of

        if len(prompt) < _BLOCK:
            return self._least.choose(prompt, fleet)
        if self._ring is None:
            self._ring = _ring(len(fleet), self._load_factor)
        key = key_of([array("q", prompt[: self._num_tokens]).tobytes().hex()])
        return self._ring.choose(key, {index: fleet.in_flight[index] for index in fleet.ready}).server


def _ring(replicas: int, load_factor: float) -> BoundedRing:
    from inflight_gateway.affinity import BoundedRing

    return BoundedRing([f"replica-{index}" for index in range(replicas)], load_factor)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "least-waiting": LeastWaiting,
    "prefix-affinity": PrefixAffinity,
}


def make_router(name: str) -> Router:
    """A router by name.

    Raises:
        ConfigError: an unknown one, or one whose library is not installed.
    """
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r}: must be one of {', '.join(ROUTERS)}")
    if name == "prefix-affinity":
        try:
            import inflight_gateway.affinity  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(f"router {name!r} needs {error.name}: pip install 'triton-inflight[gateway]'") from None
    return ROUTERS[name]()
