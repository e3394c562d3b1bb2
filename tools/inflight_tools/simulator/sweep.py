"""Tries settings on a load to find the one that meets the SLO with the highest goodput."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from inflight.config import ConfigError, EngineConfig
from inflight_tools.simulator.report import Report
from inflight_tools.workload.slo import SLO

__all__ = ["Trial", "best", "highest_rate", "parse_sweep", "settings"]

_MAX_SETTINGS = 400
_BISECTIONS = 6
_MAX_DOUBLINGS = 12


@dataclass(frozen=True)
class Trial:
    """A setting and its result; `rate` is the arrival rate in requests per second, 0 in a closed loop."""

    setting: dict[str, Any]
    report: Report
    rate: float = 0.0

    def meets(self, slo: SLO) -> bool:
        """Whether enough requests were good."""
        return self.report.attainment >= slo.attainment


def parse_sweep(text: str) -> dict[str, list[Any]]:
    """Keys of `model.json` and the values to try.

    `max_num_seqs=8,16,32,max_num_batched_tokens=256..2048`: values are separated by commas, `a..b`
    doubles from a to b.  A value is JSON if it parses as JSON, otherwise a string.

    Raises:
        ConfigError: no `key=values`, an unknown key, or an invalid range.
    """
    found: dict[str, list[Any]] = {}
    key = ""
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if equals:
            key = name.strip()
            if key not in EngineConfig.__struct_fields__:
                raise ConfigError(f"--sweep {text!r}: {key!r} is not a key of model.json")
            found.setdefault(key, [])
        elif not key:
            raise ConfigError(f"--sweep {text!r}: expected KEY=VALUES, such as max_num_seqs=8,16,32")
        found[key] += _values(value if equals else part, text)
    if not found or not all(found.values()):
        raise ConfigError(f"--sweep {text!r}: expected KEY=VALUES, such as max_num_seqs=8,16,32")
    count = len(list(settings(found)))
    if count > _MAX_SETTINGS:
        raise ConfigError(f"--sweep {text!r}: {count} settings exceed the limit of {_MAX_SETTINGS}; give fewer values")
    return found


def _values(part: str, text: str) -> list[Any]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", part.strip())
    if span is None:
        if not part.strip():
            return []
        try:
            return [json.loads(part)]
        except json.JSONDecodeError:
            return [part]
    low, high = int(span[1]), int(span[2])
    if not 0 < low <= high:
        raise ConfigError(f"--sweep {text!r}: {part} is not a range; give positive numbers, the smaller one first")
    return [*itertools.takewhile(lambda value: value < high, (low << k for k in itertools.count())), high]


def settings(values: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations."""
    return (dict(zip(values, chosen)) for chosen in itertools.product(*values.values()))


def highest_rate(attempt: Callable[[float], Trial], start: float, slo: SLO) -> Trial:
    """The highest arrival rate at which a setting meets the SLO, by doubling and bisection.

    Args:
        attempt: simulates the load at a rate in requests per second.
        start: the first rate to try.

    Returns:
        The trial at that rate; if none meets the SLO, the trial at the lowest rate.
    """
    good, bad, trial = None, None, attempt(start)
    for _ in range(_MAX_DOUBLINGS):
        if trial.meets(slo):
            good = trial
            if bad is not None:
                break
            trial = attempt(2 * trial.rate)
        else:
            bad = trial
            if good is not None:
                break
            trial = attempt(trial.rate / 2)
    if good is None or bad is None:
        return good or trial
    for _ in range(_BISECTIONS):
        trial = attempt((good.rate + bad.rate) / 2)
        if trial.meets(slo):
            good = trial
        else:
            bad = trial
    return good


def best(trials: list[Trial], slo: SLO) -> Trial | None:
    """The trial that meets the SLO with the highest goodput; the first one of equals."""
    meeting = [trial for trial in trials if trial.meets(slo)]
    return max(meeting, key=lambda trial: trial.report.goodput, default=None)
