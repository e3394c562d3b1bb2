"""The result of a simulation as numbers and as a table."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from inflight_tools.simulator.simulation import Outcome
from inflight_tools.workload.slo import SLO

__all__ = ["Percentiles", "Report", "summarise", "table"]


class Percentiles(msgspec.Struct, frozen=True):
    """Mean and percentiles of seconds; zeros if there are no values."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        found = np.fromiter(values, float)
        if not len(found):
            return cls()
        return cls(float(found.mean()), *map(float, np.percentile(found, (50, 95, 99))))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation in numbers; rates are per virtual second, over all replicas together.

    Attributes:
        requests, refused: requests sent, and those rejected (a full queue, a prompt that does not fit).
        seconds: from the first arrival to the last token.
        tokens: output tokens.
        goodput: requests per second that met the SLO.
        attainment: share of the requests that met the SLO.
        steps, sequences_per_step: number of steps, and mean number of sequences per step.
        busy: share of the time in which a replica's device ran a step.
        preemptions: number of times a request lost its blocks.
        kv_use_mean, kv_use_max: share of a replica's KV blocks in use, over the time of its steps.
        prefix_hits: share of the prompt tokens found in the prefix cache.
    """

    requests: int
    refused: int
    seconds: float
    tokens: int
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    attainment: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    latency: Percentiles
    steps: int
    sequences_per_step: float
    busy: float
    preemptions: int
    kv_use_mean: float
    kv_use_max: float
    prefix_hits: float
    replicas: int


def summarise(outcome: Outcome, slo: SLO) -> Report:
    """The report of a simulation."""
    requests = outcome.requests
    served = [request for request in requests if request.first is not None]
    seconds, good = outcome.seconds, sum(slo.met(request.ttft, request.tpot) for request in requests)
    tokens, steps = sum(request.tokens for request in served), sum(replica.steps for replica in outcome.replicas)
    per_second = 1.0 / seconds if seconds else 0.0
    pools = [replica.pool for replica in outcome.replicas]
    queried = sum(pool.num_prefix_queries for pool in pools)
    means = [mean for mean, _ in outcome.kv_use]
    return Report(
        requests=len(requests),
        refused=len(requests) - len(served),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens * per_second,
        requests_per_second=len(served) * per_second,
        goodput=good * per_second,
        attainment=good / len(requests) if requests else 0.0,
        ttft=Percentiles.of(request.first - request.arrival for request in served if request.first is not None),
        tpot=Percentiles.of(tpot for request in served if (tpot := request.tpot) is not None),
        itl=Percentiles.of(outcome.gaps),
        latency=Percentiles.of(request.last - request.arrival for request in served),
        steps=steps,
        sequences_per_step=tokens / steps if steps else 0.0,
        busy=sum(replica.busy for replica in outcome.replicas) * per_second / len(outcome.replicas),
        preemptions=sum(replica.scheduler.num_preempted_total for replica in outcome.replicas),
        kv_use_mean=sum(means) / len(means),
        kv_use_max=max(peak for _, peak in outcome.kv_use),
        prefix_hits=sum(pool.num_prefix_hits for pool in pools) / queried if queried else 0.0,
        replicas=len(outcome.replicas),
    )


def table(report: Report, slo: SLO) -> str:
    """The report as text."""
    lines = [
        f"requests      {report.requests} in {report.seconds:.1f} s on {report.replicas} replica"
        + ("s" if report.replicas > 1 else "")
        + (f", {report.refused} refused" if report.refused else ""),
        f"throughput    {report.tokens_per_second:.1f} tokens/s, {report.requests_per_second:.2f} requests/s",
        f"goodput       {report.goodput:.2f} requests/s: {100 * report.attainment:.1f}% within "
        f"{slo.ttft:g} s to the first token and {1000 * slo.tpot:g} ms per further one",
        f"{'':<13} {'mean':>9} {'p50':>9} {'p95':>9} {'p99':>9}   ms",
    ]
    named = {"TTFT": report.ttft, "ITL": report.itl, "TPOT": report.tpot, "latency": report.latency}
    for name, found in named.items():
        values = (found.mean, found.p50, found.p95, found.p99)
        lines.append(f"{name:<13} " + " ".join(f"{1000 * value:9.1f}" for value in values))
    lines += [
        f"steps         {report.steps} with {report.sequences_per_step:.1f} sequences; "
        f"device busy {100 * report.busy:.0f}%",
        f"KV blocks     {100 * report.kv_use_mean:.1f}% in use on average, {100 * report.kv_use_max:.1f}% at most; "
        f"{report.preemptions} preemptions; {100 * report.prefix_hits:.1f}% of prompt tokens cached",
    ]
    return "\n".join(lines)
