"""The result of a simulation as numbers and as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np

from inflight.engine.tiers.tier import Tier
from inflight_tools.simulator.outcome import Handovers, Outcome, Served
from inflight_tools.workload.slo import SLO

__all__ = ["HandoverReport", "IncidentReport", "Percentiles", "Report", "Seen", "TierReport", "summarise", "table"]


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


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies and goodput of some of the requests.

    Attributes:
        goodput: requests per second that met the SLO, by the time at which they ended.
        attainment: share of the requests that met the SLO.
    """

    requests: int
    goodput: float
    attainment: float
    ttft: Percentiles
    itl: Percentiles
    latency: Percentiles


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of incidents on users.

    Attributes:
        seconds: in which some replica was not ready, or a rollout went on.
        resumed: requests that went on at another replica.
        recomputed_tokens: tokens whose KV was lost with a replica and computed again elsewhere.
        during: requests that were open in these seconds, and their gaps between tokens that overlap them.
        outside: the others.
    """

    seconds: float
    resumed: int
    recomputed_tokens: int
    during: Seen
    outside: Seen


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """A KV tier of all replicas together.

    Attributes:
        loaded, stored: extents that were read and written.
        dropped: extents that were not written because too many others waited.
        load_seconds: mean of an extent that was read.
        num_bytes: that the running replicas' have in the end.
    """

    type: str
    loaded: int
    stored: int
    dropped: int
    load_seconds: float
    num_bytes: int


class HandoverReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work of replicas that compute only prompts.

    Attributes:
        outcomes: as in the gateway's `inflight_gateway_handovers_total`.
        gap: from the first token, from a replica for prompts, to the next one, from another replica.
        bytes_sent: of KV, by the replicas for prompts.
        busiest_link: largest share of the time in which the network of one of them sent.
        prefill_busy, decode_busy: share of the time in which a step ran, on a replica of each kind.
    """

    outcomes: dict[str, int]
    gap: Percentiles
    bytes_sent: int
    busiest_link: float
    prefill_busy: float
    decode_busy: float


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
        drafts, draft_tokens, accepted_tokens: rows that verified a draft, the drafts' tokens, and those accepted.
        kv_use_mean, kv_use_max: share of a replica's KV blocks in use, over the time of its steps.
        prefix_hits: share of the prompt tokens found in the prefix cache, those included that came from a KV tier.
        tier_hits: tokens that came from a KV tier, as a share of the prompt tokens.
        kv_tiers: the fastest first.
        waiting, kv_cache_usage: mean of the gauges of a ready replica until the last arrival: requests that wait, and
            share of the KV blocks in use.
        incident: None if there was none.
        handover: None if no replica computes only prompts.
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
    waiting: float
    kv_cache_usage: float
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tier_hits: float = 0.0
    kv_tiers: list[TierReport] = []
    incident: IncidentReport | None = None
    handover: HandoverReport | None = None


def summarise(outcome: Outcome, slo: SLO) -> Report:
    """The report of a simulation."""
    requests = outcome.requests
    served = [request for request in requests if request.first is not None]
    seconds = outcome.seconds
    good = sum(slo.met(request.ttft, request.tpot, request.longest_gap) for request in requests)
    engines = [*outcome.retired, *outcome.replicas]
    tokens, steps = sum(request.tokens for request in served), sum(engine.steps for engine in engines)
    per_second = 1.0 / seconds if seconds else 0.0
    queried = sum(engine.pool.num_prefix_queries for engine in engines)
    means = [mean for mean, _ in outcome.kv_use]
    counts = [engine.scheduler.policies.draft_counts for engine in engines]
    accepted = sum(count.accepted for count in counts)
    from_tiers = sum(engine.kv_tiers.tiers.num_hits for engine in engines if engine.kv_tiers is not None)
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
        sequences_per_step=(tokens - accepted) / steps if steps else 0.0,
        busy=sum(engine.busy for engine in engines) * per_second / outcome.num_replicas,
        preemptions=sum(engine.scheduler.num_preempted_total for engine in engines),
        kv_use_mean=sum(means) / len(means),
        kv_use_max=max(peak for _, peak in outcome.kv_use),
        prefix_hits=sum(engine.pool.num_prefix_hits for engine in engines) / queried if queried else 0.0,
        replicas=outcome.num_replicas,
        waiting=outcome.waiting,
        kv_cache_usage=outcome.kv_cache_usage,
        drafts=sum(count.drafts for count in counts),
        draft_tokens=sum(count.tokens for count in counts),
        accepted_tokens=accepted,
        tier_hits=from_tiers / queried if queried else 0.0,
        kv_tiers=_of_tiers(outcome),
        incident=_of_incidents(outcome, slo) if outcome.windows else None,
        handover=None if outcome.handovers is None else _of_handovers(outcome.handovers),
    )


def _of_handovers(found: Handovers) -> HandoverReport:
    return HandoverReport(
        outcomes=dict(sorted(found.outcomes.items())),
        gap=Percentiles.of(found.gaps),
        bytes_sent=found.bytes_sent,
        busiest_link=found.busiest,
        prefill_busy=found.prefill_busy,
        decode_busy=found.decode_busy,
    )


def _of_tiers(outcome: Outcome) -> list[TierReport]:
    tiers: defaultdict[tuple[str, int], list[Tier]] = defaultdict(list)
    kept: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # bytes of each store
    live = len(outcome.retired)
    for index, engine in enumerate((*outcome.retired, *outcome.replicas)):
        for name, number, tier, store in [] if engine.kv_tiers is None else engine.kv_tiers.places:
            tiers[name, number].append(tier)
            if store is not None and index >= live:
                kept[name, number][id(store)] = store.num_bytes
    reports: list[TierReport] = []
    for place, found in tiers.items():
        loaded = sum(tier.num_loaded for tier in found)
        reports.append(
            TierReport(
                type=place[0],
                loaded=loaded,
                stored=sum(tier.num_stored for tier in found),
                dropped=sum(tier.num_dropped for tier in found),
                load_seconds=sum(tier.load_seconds for tier in found) / loaded if loaded else 0.0,
                num_bytes=sum(kept[place].values()),
            )
        )
    return reports


def _of_incidents(outcome: Outcome, slo: SLO) -> IncidentReport:
    """The requests that were open in a window, and the others."""
    end = max(request.last for request in outcome.requests)
    windows = [(start, min(stop, end)) for start, stop in outcome.windows if start < end]
    seconds = sum(stop - start for start, stop in windows)
    during: list[Served] = []
    outside: list[Served] = []
    ended = [0, 0]
    for request in outcome.requests:
        last = max(request.last, request.arrival)
        overlaps = any(request.arrival <= stop and last >= start for start, stop in windows)
        (during if overlaps else outside).append(request)
        inside = any(start <= last <= stop for start, stop in windows)
        ended[inside] += slo.met(request.ttft, request.tpot, request.longest_gap)
    gaps, disturbed = np.array(outcome.gaps), np.array(outcome.disturbed).astype(bool)
    return IncidentReport(
        seconds=seconds,
        resumed=sum(request.resumed > 0 for request in outcome.requests),
        recomputed_tokens=sum(request.recomputed for request in outcome.requests),
        during=_seen(during, gaps[disturbed], slo, ended[1], seconds),
        outside=_seen(outside, gaps[~disturbed], slo, ended[0], outcome.seconds - seconds),
    )


def _seen(requests: list[Served], gaps: Iterable[float], slo: SLO, ended: int, seconds: float) -> Seen:
    served = [request for request in requests if request.first is not None]
    good = sum(slo.met(request.ttft, request.tpot, request.longest_gap) for request in requests)
    return Seen(
        requests=len(requests),
        goodput=ended / seconds if seconds > 0 else 0.0,
        attainment=good / len(requests) if requests else 0.0,
        ttft=Percentiles.of(ttft for request in served if (ttft := request.ttft) is not None),
        itl=Percentiles.of(gaps),
        latency=Percentiles.of(request.last - request.arrival for request in served),
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
    if report.drafts:
        lines.append(
            f"drafts        {report.drafts} of {report.draft_tokens / report.drafts:.1f} tokens; "
            f"{100 * report.accepted_tokens / report.draft_tokens:.1f}% of the tokens accepted"
        )
    for tier in report.kv_tiers:
        lines.append(
            f"KV tier       {tier.type}: {tier.loaded} extents loaded, {1000 * tier.load_seconds:.2f} ms each; "
            f"{tier.stored} kept, {tier.dropped} dropped; {tier.num_bytes / 2**30:.2f} GiB"
        )
    if report.kv_tiers:
        lines.append(f"{'':<13} {100 * report.tier_hits:.1f}% of prompt tokens came from tiers")
    if report.incident is not None:
        lines += _incident_lines(report.incident)
    return "\n".join(lines)


def _incident_lines(incident: IncidentReport) -> list[str]:
    """Users during and outside of the incidents."""
    lines = [
        f"incidents     {incident.seconds:.1f} s; requests resumed elsewhere: {incident.resumed}, "
        f"tokens computed again: {incident.recomputed_tokens}, requests lost: 0",
        f"{'':<13} {'requests':>9} {'good':>7} {'goodput':>8} {'TTFT p50':>9} {'p99':>9} {'ITL p50':>9} {'p99':>9} "
        f"{'E2E p50':>9} {'p99':>9}   ms",
    ]
    for name, seen in (("  during", incident.during), ("  outside", incident.outside)):
        times = [1000 * value for found in (seen.ttft, seen.itl, seen.latency) for value in (found.p50, found.p99)]
        lines.append(
            f"{name:<13} {seen.requests:9d} {100 * seen.attainment:6.1f}% {seen.goodput:8.2f} "
            + " ".join(f"{value:9.1f}" for value in times)
        )
    return lines
