"""Custom metrics on Triton's `/metrics`.  No torch.

A call to a Triton metric is a message to the server process (about 18 microseconds on Triton
24.10, measured), so there is none per token: `Metrics` counts in plain Python and publishes sums.

- The counts of a request are published before its last response is sent: a scrape right after an answer
  includes them.
- The counts of steps (gauges, blocks, histograms of tokens and steps) are published at the same time, unless that
  would take more than `_SHARE` of the time; then, and between answers, a thread publishes them.

No metric is ever deleted: its series would disappear from dashboards.  An instance that leaves sets its gauges
to 0.  The next instance uses the same gauges and may be running already, so every instance sets its gauges in every
period even if they have not changed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from inflight.engine.deltas import StepStats
from inflight.engine.messages import EngineReady, StepMessage
from inflight.frontend.operator.histograms import CountedHistogram, TokenGaps
from inflight.frontend.operator.kv_tier_counts import new_counts
from inflight.frontend.operator.metric_specs import (
    COUNTED,
    COUNTER,
    DRAFT_POSITIONS,
    GAUGE,
    METRICS,
    MetricSpec,
    buckets_1_2_5,
)

if TYPE_CHECKING:
    from inflight.frontend.output.request_state import RequestState

__all__ = ["CreateMetric", "Metrics", "NoMetrics"]

_PERIOD_SECONDS = 0.5
_SHARE = 0.02  # maximum share of the time for publishing the counts of steps
_MAX_KEPT = 10_000  # bounds the memory if publishing fails

_CACHE_INFO = "vllm:cache_config_info"
_GAPS = ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds")

# Creates a Triton metric: (family, labels, buckets of a histogram or None).
CreateMetric = Callable[[MetricSpec, dict[str, str], "list[float] | None"], Any]

# Counters, and the fields of `StepStats` that they sum up; these fields start at 0 in each engine process.
_TOTALS = {
    "inflight_requests_preempted_total": "preempted_total",
    "inflight_swapped_out_blocks_total": "swapped_out_total",
    "inflight_swapped_in_blocks_total": "swapped_in_total",
    "inflight_prefix_cache_queries_total": "prefix_queries_total",
    "inflight_prefix_cache_hits_total": "prefix_hits_total",
    "inflight_steps_collected_first_total": "collected_first_total",
    "inflight_kv_event_batches_total": "kv_event_batches_total",
    "inflight_kv_event_batches_dropped_total": "kv_event_batches_dropped_total",
    "vllm:num_preemptions_total": "preempted_total",
    "vllm:prefix_cache_queries_total": "prefix_queries_total",
    "vllm:prefix_cache_hits_total": "prefix_hits_total",
}
# The counters of `StepStats.draft_totals`, in order.
_DRAFT_TOTALS: tuple[Any, ...] = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    *(("vllm:spec_decode_num_accepted_tokens_per_pos_total", position) for position in DRAFT_POSITIONS),
)


def _gauges(now: StepStats) -> dict[Any, float]:
    found: dict[Any, float] = {
        "vllm:num_requests_running": now.running,
        "vllm:num_requests_waiting": now.waiting,
        "vllm:kv_cache_usage_perc": now.blocks_used / max(1, now.blocks_used + now.blocks_free),
        "inflight_requests_running": now.running,
        "inflight_requests_waiting": now.waiting,
        "inflight_kv_blocks_used": now.blocks_used,
        "inflight_kv_blocks_free": now.blocks_free,
        "inflight_host_blocks_used": now.host_blocks_used,
    }
    for tier in now.kv_tiers.tiers if now.kv_tiers else ():
        found["inflight_kv_tier_bytes", tier.tier] = tier.num_bytes
    return found


class _Published:
    """The Triton metrics, by name or by (name, values of the family's labels); `create` makes them."""

    def __init__(self, create: CreateMetric, max_model_len: int) -> None:
        self._create = create
        self._metrics: dict[Any, Any] = {}
        self._values: dict[Any, float] = {}  # last values of the gauges
        self.counted: dict[str, CountedHistogram] = {}
        lengths = buckets_1_2_5(max_model_len)
        for spec in METRICS:
            if spec.kind == COUNTED:
                self._add_counted(spec)
            elif spec.label is not None:
                name, values = spec.label
                for value in values:
                    self._metrics[spec.name, value] = create(spec, {name: value}, None)
            elif spec.name != _CACHE_INFO and not spec.engine_labels:
                plain = spec.kind in (COUNTER, GAUGE)
                self._metrics[spec.name] = create(spec, {}, None if plain else list(spec.buckets or lengths))

    def _add_counted(self, spec: MetricSpec) -> None:
        histogram = self.counted[spec.name] = CountedHistogram(spec.buckets or ())
        parts = {
            suffix: spec._replace(name=spec.name + suffix, kind=COUNTER) for suffix in ("_bucket", "_sum", "_count")
        }
        bounds = [*(format(bound, "g") for bound in histogram.bounds), "+Inf"]
        self._metrics[spec.name] = (
            [self._create(parts["_bucket"], {"le": bound}, None) for bound in bounds],
            self._create(parts["_sum"], {}, None),
            self._create(parts["_count"], {}, None),
        )

    def set_cache_config(self, block_size: int, num_blocks: int) -> None:
        """Publish the size of the KV pool; the metric of an earlier size is set to 0."""
        labels = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}
        key = _CACHE_INFO, *labels.values()
        for other in [other for other in self._values if other[0] == _CACHE_INFO and other != key]:
            self.set(other, 0)
        if key not in self._metrics:
            spec = next(spec for spec in METRICS if spec.name == _CACHE_INFO)
            self._metrics[key] = self._create(spec, labels, None)
        self.set(key, 1)

    def set_again(self) -> None:
        """Publish the next values of all gauges, even if they have not changed."""
        self._values = dict.fromkeys(self._values, math.nan)

    def clear(self) -> None:
        """Set the gauges to 0."""
        for key in self._values:
            self.set(key, 0.0)

    def set(self, key: Any, value: float) -> None:
        if self._values.get(key) != value:
            self._metric(key).set(value)
            self._values[key] = value

    def increment(self, key: Any, amount: float) -> None:
        if amount:
            self._metric(key).increment(amount)

    def _metric(self, key: Any) -> Any:
        """A metric, which is made when the engine first counts something for its labels."""
        found = self._metrics.get(key)
        if found is None:
            name, *values = key
            spec = next(spec for spec in METRICS if spec.name == name)
            found = self._metrics[key] = self._create(spec, dict(zip(spec.engine_labels, values)), None)
        return found

    def observe(self, key: Any, value: float) -> None:
        self._metrics[key].observe(value)

    def add(self, name: str, counts: list[int], total: float) -> None:
        """Publish the result of `CountedHistogram.take`."""
        if counts[-1]:
            buckets, sums, observations = self._metrics[name]
            for bucket, count in zip(buckets, counts):
                if count:
                    bucket.increment(count)
            if total:
                sums.increment(total)
            observations.increment(counts[-1])


class Metrics:
    """Gathers statistics and publishes them.

    Any thread can call any method.  Only `settle` and `publish` communicate with Triton; the others count.

    Args:
        create: creates a Triton metric.
        max_model_len: upper bound of the token count histograms.
        clock: seconds.
    """

    def __init__(self, create: CreateMetric, max_model_len: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._published = _Published(create, max_model_len)
        self._clock = clock
        self._lock = threading.Lock()  # guards counts that were not published yet
        self._observations: deque[tuple[str, float]] = deque(maxlen=_MAX_KEPT)
        self._counts: Counter[Any] = Counter()  # of requests
        self._step_counts: Counter[Any] = Counter()
        self._now: StepStats | None = None
        self._pool: tuple[int, int] | None = None
        self._leads = True  # one of the frontends that share an engine publishes the engine's metrics
        self._gaps = TokenGaps()
        self._publishing = threading.Lock()  # values reach Triton in order; guards the one below
        self._next_steps = float("-inf")  # when the counts of steps can be published with an answer again
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish the remaining counts, end the thread and set the gauges to 0."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._publishing:
            self._published.clear()

    # -- counting --------------------------------------------------------------------------

    def step(self, message: StepMessage, received: float, open_ids: Container[int]) -> None:
        """Count one engine step, which arrived at `received`; `open_ids`: ids of the open requests."""
        stats, leads, counted = message.stats, message.leads, self._published.counted
        with self._lock:
            self._take_stats(stats, leads)
            self._counts["vllm:generation_tokens_total"] += message.num_tokens
            for gap, count in self._gaps.take(message, received, open_ids):
                for name in _GAPS:
                    counted[name].add(gap, count)
            if leads and stats.batch_size:  # a step without rows only reports the state
                self._step_counts["inflight_prompt_tokens_computed_total"] += stats.prompt_tokens
                counted["inflight_step_seconds"].add(stats.step_seconds)
                counted["inflight_batch_size"].add(stats.batch_size)
                counted["inflight_scheduled_tokens"].add(stats.scheduled_tokens)

    def _take_stats(self, stats: StepStats, leads: bool) -> None:
        before, self._now, self._leads = self._now, stats, leads
        for name, field in _TOTALS.items() if leads else ():
            value, base = getattr(stats, field), getattr(before, field, 0)
            self._step_counts[name] += value - base if value >= base else value  # a new engine counts from 0
        if leads and stats.kv_tiers:
            self._step_counts.update(new_counts(before.kv_tiers if before is not None else None, stats.kv_tiers))
        if leads and stats.draft_totals:
            bases = before.draft_totals if before is not None and before.draft_totals else [0] * len(stats.draft_totals)
            for name, value, base in zip(_DRAFT_TOTALS, stats.draft_totals, bases):
                self._step_counts[name] += value - base if value >= base else value

    def engine_ready(self, ready: EngineReady, again: bool) -> None:
        """An engine process is ready; `again`: after the first one."""
        with self._lock:
            self._pool, self._leads = (ready.block_size, ready.num_blocks), ready.leads
            self._counts["inflight_engine_restarts_total"] += again and ready.leads

    def engine_down(self) -> None:
        """The engine process died with all its sequences; the next one counts from 0."""
        with self._lock:
            self._counts["inflight_engine_deaths_total"] += self._leads
            self._gaps.clear()
            if self._now is not None:
                nothing: dict[str, Any] = dict.fromkeys(StepStats.__struct_fields__, 0)
                nothing |= {"draft_totals": [], "kv_tiers": None}
                nothing["blocks_free"] = self._now.blocks_used + self._now.blocks_free
                self._take_stats(StepStats(**nothing), self._leads)

    def resubmitted(self, count: int) -> None:
        """Requests of an engine process that died were given to the next one."""
        with self._lock:
            self._counts["inflight_requests_replayed_total"] += count

    def first_token(self, stream: RequestState) -> None:
        """A request got its first token."""
        assert stream.first_token_time is not None
        with self._lock:
            self._counts["vllm:prompt_tokens_total"] += len(stream.request.engine_request.prompt_token_ids)
            self._observations.append(("vllm:time_to_first_token_seconds", stream.first_token_time - stream.arrival))

    def finished(self, stream: RequestState) -> None:
        """A request ended with its last token."""
        assert stream.end_time is not None
        sent = stream.request.engine_request
        found = [
            ("vllm:e2e_request_latency_seconds", stream.end_time - stream.arrival),
            ("vllm:request_prompt_tokens", float(len(sent.prompt_token_ids))),
            ("vllm:request_generation_tokens", float(stream.num_output_tokens)),
            ("vllm:request_params_n", float(sent.params.n)),
        ]
        longest = max(sequence.num_generated_tokens for sequence in stream.sequences)
        if stream.first_token_time is not None and longest > 1:
            gap = (stream.end_time - stream.first_token_time) / (longest - 1)
            found.append(("inflight_request_time_per_output_token_seconds", gap))
        pooling = sent.attached.pooling if sent.attached is not None else None
        with self._lock:
            if pooling is not None:
                self._counts["inflight_pooled_total", pooling.task] += 1
            self._observations += found
            self._count_sequences(stream, None)

    def unsuccessful(self, ending: str, stream: RequestState | None = None) -> None:
        """A request ended with an error, `ending` of `ENDINGS`; `stream` is None if it was refused at once."""
        with self._lock:
            self._counts["inflight_requests_unsuccessful_total", ending] += 1
            if stream is not None:
                self._count_sequences(stream, "abort" if ending in ("cancelled", "timeout") else "error")

    def _count_sequences(self, stream: RequestState, reason: str | None) -> None:
        """Count the finish reasons of its sequences; `reason` is that of unfinished ones."""
        for sequence in stream.sequences:
            ended = sequence.finish_reason if sequence.ended else reason
            if ended is not None:  # else it had ended before its request arrived here
                self._counts["vllm:request_success_total", ended] += 1
        self._gaps.forget(stream.request_id, len(stream.sequences))

    # -- publishing ------------------------------------------------------------------------

    def settle(self) -> None:
        """Publish the counts of requests, and of steps unless that takes too much time."""
        with self._publishing:
            self._publish_requests()
            start = self._clock()
            if start >= self._next_steps:
                self._publish_steps()
                end = self._clock()
                self._next_steps = end + (end - start) / _SHARE
            else:
                self._wake.set()

    def publish(self) -> None:
        """Publish all counts."""
        with self._publishing:
            self._publish_requests()
            self._publish_steps()

    def _loop(self) -> None:
        while not self._stopping:
            if self._wake.wait(_PERIOD_SECONDS) and not self._stopping:
                self._wake.clear()
                time.sleep(min(_PERIOD_SECONDS, max(0.0, self._next_steps - self._clock())))
            with self._publishing:
                self._published.set_again()
            self.publish()
        self.publish()

    def _publish_requests(self) -> None:
        with self._lock:
            observations = list(self._observations)
            self._observations.clear()
            counts, self._counts = self._counts, Counter()
        for name, value in observations:
            self._published.observe(name, value)
        for key, amount in counts.items():
            self._published.increment(key, amount)

    def _publish_steps(self) -> None:
        with self._lock:
            now, pool = (self._now, self._pool) if self._leads else (None, None)
            step_counts, self._step_counts = self._step_counts, Counter()
            taken = [(name, *histogram.take()) for name, histogram in self._published.counted.items()]
        if pool is not None:
            self._published.set_cache_config(*pool)
        for name, value in _gauges(now).items() if now is not None else ():
            self._published.set(name, value)
        for key, amount in step_counts.items():
            self._published.increment(key, amount)
        for name, counts, total in taken:
            self._published.add(name, counts, total)


class NoMetrics:
    """Has the same methods as `Metrics`, and publishes nothing."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def step(self, message: StepMessage, received: float, open_ids: Container[int]) -> None: ...
    def engine_ready(self, ready: EngineReady, again: bool) -> None: ...
    def engine_down(self) -> None: ...
    def resubmitted(self, count: int) -> None: ...
    def first_token(self, stream: RequestState) -> None: ...
    def finished(self, stream: RequestState) -> None: ...
    def unsuccessful(self, ending: str, stream: RequestState | None = None) -> None: ...
    def settle(self) -> None: ...
