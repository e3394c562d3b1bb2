"""Incidents of replicas while they serve: kills and rolling restarts, as data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from inflight.config import ConfigError

__all__ = ["Incidents", "Kill", "Rollout", "parse_kill"]


@dataclass(frozen=True)
class Kill:
    """A replica dies; its requests go on elsewhere.

    Attributes:
        at: virtual seconds.
        replica: its index.  If it is down already, nothing happens.
    """

    at: float
    replica: int = 0


@dataclass(frozen=True)
class Rollout:
    """All replicas are restarted, in the order of their indices.

    Attributes:
        at: virtual seconds at which it begins.
        max_unavailable: a replica is taken out only if then at most this many, killed ones included, are not ready.
        grace: seconds in which a replica that gets no new requests can finish its open ones; then it is stopped, and
            the rest go on elsewhere.
    """

    at: float
    max_unavailable: int = 1
    grace: float = 30.0


@dataclass(frozen=True)
class Incidents:
    """The incidents of a simulation.

    Attributes:
        startup: seconds from the end of a replica until its successor, with an empty prefix cache, is ready;
            infinite if none comes.
    """

    kills: tuple[Kill, ...] = ()
    rollout: Rollout | None = None
    startup: float = 60.0

    def check(self, replicas: int, prefills: int = 0) -> None:
        """Reject what a fleet of this size cannot live through.

        Args:
            prefills: replicas behind the others that compute only prompts.

        Raises:
            ConfigError: a replica that does not exist, a time below 0, or no replica left.
        """
        count = replicas + prefills
        for kill in self.kills:
            if not 0 <= kill.replica < count:
                raise ConfigError(
                    f"--kill: there is no replica {kill.replica} among {count}; give one from 0 to {count - 1}"
                )
        times = [kill.at for kill in self.kills]
        if self.rollout is not None:
            times += [self.rollout.at, self.rollout.grace]
        if not all(0 <= at < math.inf for at in times) or not self.startup >= 0:
            raise ConfigError("times of --kill, --rollout, --grace and --startup are seconds, 0 or more")
        if self.rollout is not None and self.rollout.max_unavailable < 1:
            raise ConfigError("--max-unavailable must be at least 1, or the rollout never begins")
        if math.isinf(self.startup) and (self.rollout or {kill.replica for kill in self.kills} >= {*range(replicas)}):
            raise ConfigError("--startup inf: no replica would be left; give a number of seconds")


def parse_kill(text: str) -> Kill:
    """`SECONDS` or `SECONDS:REPLICA`; the first replica if none is named.

    Raises:
        ConfigError: anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)(?::(\d+))?", text.strip())
    if found is None:
        raise ConfigError(f"--kill {text!r}: expected SECONDS or SECONDS:REPLICA, such as 30 or 30:2")
    return Kill(float(found[1]), int(found[2] or 0))
