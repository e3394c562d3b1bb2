"""Numbers from records.  Times are in seconds; percentiles are over all requests of all rounds."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inflight_tools.workload.slo import SLO

__all__ = ["Phase", "cdf", "is_good", "knee", "percentiles", "read_phase", "summary"]

_CDF_POINTS = 120


@dataclass
class Phase:
    """One load on one target.

    Attributes:
        model: the target's key.
        rows: one object per request that ended, as `users.RequestFeed` writes them.
        expected: number of requests that were sent or should have been; None if unknown.
        begun: `time.time()` at the start, the origin of the rows' times.
        samples: those of `Monitor`.
        label: human-readable.
    """

    model: str
    rows: list[dict[str, Any]]
    expected: int | None = None
    begun: float = 0.0
    samples: list[dict[str, Any]] = field(default_factory=list)
    label: str = ""

    @property
    def done(self) -> list[dict[str, Any]]:
        """Requests that were answered in full."""
        return [row for row in self.rows if row["error"] is None]

    @property
    def tokens(self) -> int:
        return sum(map(_count, self.rows))

    @property
    def seconds(self) -> float:
        """From the start to the end of the last request."""
        return max((row["start"] + row["latency"] for row in self.rows), default=0.0)

    @property
    def lost(self) -> int:
        """Requests that failed or never ended."""
        failed = len(self.rows) - len(self.done)
        return failed + (max(0, self.expected - len(self.rows)) if self.expected is not None else 0)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole load, including its end, when fewer and fewer requests are open."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def offered_tokens_per_second(self) -> float:
        """In an open loop, the requested output tokens over the time in which their requests were due."""
        dues = sorted(row["due"] or 0.0 for row in self.rows)
        if len(dues) < 2 or dues[-1] == dues[0]:
            return 0.0
        # n arrivals have n - 1 gaps between them.
        # An answer that the model ended itself could not have been longer.
        tokens = [_count(row) if row["error"] is None else row["output_tokens"] for row in self.rows]
        return sum(tokens) * (1 - 1 / len(dues)) / (dues[-1] - dues[0])

    @property
    def saturated_tokens_per_second(self) -> float:
        """While every user had a request open: up to the last token that arrived before the last request
        was sent.  Up to a token rather than a time, since a locked batch delivers all tokens at its end."""
        last_sent = max((row["start"] for row in self.rows), default=0.0)
        times = [(row["start"] + at, count) for row in self.rows for at, count in row["arrivals"]]
        within = [(at, count) for at, count in times if at <= last_sent]
        if not within:
            return self.tokens_per_second
        return sum(count for _, count in within) / max(at for at, _ in within)

    def goodput(self, slo: SLO) -> float:
        """Requests per second that met the SLO."""
        return sum(is_good(row, slo) for row in self.rows) / self.seconds if self.seconds else 0.0

    def attainment(self, slo: SLO) -> float:
        """Share of the requests that met the SLO, 0 to 1."""
        sent = max(len(self.rows), self.expected or 0)
        return sum(is_good(row, slo) for row in self.rows) / sent if sent else 0.0

    def mean(self, key: str) -> float | None:
        """Mean of a sampled value between the first and the last request; None if it was not sampled."""
        values = [
            sample[key] for sample in self.samples if key in sample and 0 <= sample["time"] - self.begun <= self.seconds
        ]
        return statistics.fmean(values) if values else None


def _count(row: dict[str, Any]) -> int:
    """The output tokens that arrived."""
    return sum(count for _, count in row["arrivals"])


def read_phase(path: Path, model: str, expected: int | None = None, **fields: Any) -> Phase:
    """Read the phase from a record file; an incomplete last line is dropped.

    Args:
        expected: number of requests to be sent, unless the file states a larger one.
        fields: further fields of the phase.
    """
    begun = 0.0
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "begun" in row:
            begun, rows = row["begun"], []
        elif "sent" in row:
            expected = max(expected or 0, row["sent"])
        else:
            rows.append(row)
    return Phase(model, rows, expected, begun, **fields)


def is_good(row: dict[str, Any], slo: SLO) -> bool:
    """Whether a request was answered in full and met the SLO."""
    return row["error"] is None and bool(row["arrivals"]) and slo.met(row["arrivals"][0][0], row_tpot(row))


def row_tpot(row: dict[str, Any]) -> float | None:
    """Mean seconds per token after the first response; None if there was only one."""
    arrivals = row["arrivals"]
    later = sum(count for _, count in arrivals[1:])
    return (arrivals[-1][0] - arrivals[0][0]) / later if later else None


def values_of(rows: list[dict[str, Any]], metric: str) -> list[float]:
    """The metric "ttft", "latency" or "tpot" of each row, or every "itl"."""
    if metric == "ttft":
        return [row["arrivals"][0][0] for row in rows if row["arrivals"]]
    if metric == "latency":
        return [row["latency"] for row in rows]
    if metric == "tpot":
        return [value for row in rows if (value := row_tpot(row)) is not None]
    return [b[0] - a[0] for row in rows for a, b in zip(row["arrivals"], row["arrivals"][1:])]


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Count, p50, p95 and p99; None for no values."""
    if not values:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
    return {"count": len(values), "p50": p50, "p95": p95, "p99": p99}


def cdf(values: list[float]) -> list[tuple[float, float]]:
    """At most 120 points (value, share of the values up to it)."""
    if not values:
        return []
    ordered = np.sort(values)
    shares = np.linspace(0, 1, min(_CDF_POINTS, len(ordered)))
    return [(round(float(np.quantile(ordered, share)), 5), round(float(share), 4)) for share in shares]


def _mean_prompt(rows: list[dict[str, Any]], kind: str) -> float:
    return statistics.fmean(row["prompt_tokens"] for row in rows if row["kind"] == kind)


def summary(phases: list[Phase], slo: SLO, saturated: bool) -> dict[str, Any]:
    """The combined numbers of a model's rounds.

    Args:
        saturated: whether the number of users was constant, so that at times all had a request open.
    """
    rows = [row for phase in phases for row in phase.done]
    rates = [phase.saturated_tokens_per_second if saturated else phase.tokens_per_second for phase in phases]
    # Classes in the order of their prompt lengths.
    kinds = sorted({row["kind"] for row in rows}, key=lambda kind: _mean_prompt(rows, kind))

    def table(some: list[dict[str, Any]]) -> dict[str, Any]:
        return {metric: percentiles(values_of(some, metric)) for metric in ("ttft", "itl", "tpot", "latency")}

    def mean(key: str) -> float | None:
        found = [value for phase in phases if (value := phase.mean(key)) is not None]
        return statistics.fmean(found) if found else None

    return {
        "requests": sum(len(phase.rows) for phase in phases),
        "lost": sum(phase.lost for phase in phases),
        "errors": _errors(phases),
        "counted": sorted({row["counted"] for row in rows}),
        "ended_early": sum(row["ended_early"] for row in rows),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_rounds": rates,
        "tokens_per_second_whole": statistics.median(phase.tokens_per_second for phase in phases),
        "goodput": statistics.median(phase.goodput(slo) for phase in phases),
        "attainment": statistics.median(phase.attainment(slo) for phase in phases),
        "server_cores": mean("server_cores"),
        "client_cores": mean("client_cores"),
        "cores": mean("cores"),
        "gpu": mean("gpu"),
        "all": table(rows),
        "classes": {kind: table([row for row in rows if row["kind"] == kind]) for kind in kinds},
        "cdf": {metric: cdf(values_of(rows, metric)) for metric in ("ttft", "itl", "latency")},
    }


def _errors(phases: list[Phase]) -> list[str]:
    """The failures, the most frequent first: how many there were of each name, and what one of them said."""
    failed = [row for phase in phases for row in phase.rows if row["error"]]
    named = {row["failure"]: row["error"] for row in failed}
    errors = [f"{count} × {named[name]}" for name, count in Counter(row["failure"] for row in failed).most_common()]
    never = sum(phase.lost for phase in phases) - len(failed)
    return [*errors, *([f"{never} × never ended"] if never else [])]


def knee(points: list[dict[str, float]]) -> float | None:
    """Offered load beyond which the delivered load stops growing with it, in the unit of the points.

    The knee is where the line through the origin and the lowest point reaches the highest delivered load.
    None for fewer than three points, or if no point lies beyond the knee.
    """
    ordered = sorted((point for point in points if point["offered"]), key=lambda point: point["offered"])
    if len(ordered) < 3:
        return None
    slope = ordered[0]["delivered"] / ordered[0]["offered"]
    peak = max(point["delivered"] for point in ordered)
    found = peak / slope if slope else float("inf")
    return found if found < 0.97 * ordered[-1]["offered"] else None
