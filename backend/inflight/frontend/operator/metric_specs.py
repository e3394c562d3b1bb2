"""The metrics that a model publishes: names, kinds, meaning, buckets.  No torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ADAPTER_METRICS",
    "COUNTED",
    "COUNTER",
    "DRAFT_POSITIONS",
    "ENDINGS",
    "FINISHED_REASONS",
    "GAUGE",
    "HISTOGRAM",
    "METRICS",
    "POOLING_TASKS",
    "MetricSpec",
    "buckets_1_2_5",
]

COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
# A histogram that is counted here and published as counters `NAME_bucket`, `NAME_sum` and `NAME_count`: queries
# read it like any other.  Triton's histograms take one value per call, which is too expensive for each token.
COUNTED = "COUNTED"

# How a request can end without a complete output.
ENDINGS = ("invalid", "refused", "shed", "draining", "failed", "poison", "cancelled", "timeout")
# How a sequence can end; vLLM's values.
FINISHED_REASONS = ("stop", "length", "abort", "error")
# Positions in a draft; later ones are not counted by position.
DRAFT_POSITIONS = tuple(map(str, range(8)))
# The tasks of requests for vectors.
POOLING_TASKS = ("embed", "score", "classify")


class MetricSpec(NamedTuple):
    """A metric family.

    Attributes:
        buckets: upper bounds; None if `max_model_len` determines them, or if it is no histogram.
        label: a label and its values; each value has its own metric.
        engine_labels: labels whose values come with the engine's counts.
    """

    name: str
    kind: str
    description: str
    buckets: tuple[float, ...] | None = None
    label: tuple[str, tuple[str, ...]] | None = None
    engine_labels: tuple[str, ...] = ()


def buckets_1_2_5(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    steps = (factor * 10**power for power in range(len(str(limit))) for factor in (1, 2, 5))
    return [float(step) for step in steps if step <= limit]


_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_ITL = (*_TPOT, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_E2E = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_LOADS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_POWERS = tuple(float(2**k) for k in range(13))

METRICS: tuple[MetricSpec, ...] = (
    # vllm_backend's, with its buckets.
    MetricSpec("vllm:prompt_tokens_total", COUNTER, "Number of prefill tokens processed."),
    MetricSpec("vllm:generation_tokens_total", COUNTER, "Number of generation tokens processed."),
    MetricSpec("vllm:time_to_first_token_seconds", HISTOGRAM, "Time to first token in seconds.", _LATENCY),
    MetricSpec("vllm:time_per_output_token_seconds", COUNTED, "Time between two tokens of a sequence.", _TPOT),
    MetricSpec("vllm:e2e_request_latency_seconds", HISTOGRAM, "End to end request latency in seconds.", _E2E),
    MetricSpec("vllm:request_prompt_tokens", HISTOGRAM, "Number of prefill tokens of a request."),
    MetricSpec("vllm:request_generation_tokens", HISTOGRAM, "Number of generation tokens of a request."),
    MetricSpec("vllm:request_params_n", HISTOGRAM, "The n request parameter.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    # A vLLM server's metrics, which gateways and autoscalers read.
    MetricSpec("vllm:inter_token_latency_seconds", COUNTED, "Time between two tokens of a sequence.", _ITL),
    MetricSpec("vllm:num_requests_running", GAUGE, "Sequences in the running batch."),
    MetricSpec("vllm:num_requests_waiting", GAUGE, "Sequences that wait to be processed."),
    MetricSpec("vllm:kv_cache_usage_perc", GAUGE, "Share of the KV blocks that sequences hold, 0 to 1."),
    MetricSpec("vllm:cache_config_info", GAUGE, "1, with the size of the KV pool as labels."),
    MetricSpec("vllm:num_preemptions_total", COUNTER, "Sequences put back in the queue."),
    MetricSpec("vllm:prefix_cache_queries_total", COUNTER, "Prompt tokens looked up in the prefix cache."),
    MetricSpec("vllm:prefix_cache_hits_total", COUNTER, "Prompt tokens served by the prefix cache."),
    MetricSpec("vllm:external_prefix_cache_queries_total", COUNTER, "Prompt tokens looked up in KV tiers."),
    MetricSpec("vllm:external_prefix_cache_hits_total", COUNTER, "Prompt tokens whose KV a KV tier had."),
    MetricSpec(
        "vllm:request_success_total",
        COUNTER,
        "Sequences that ended, by the reason.",
        label=("finished_reason", FINISHED_REASONS),
    ),
    MetricSpec("vllm:spec_decode_num_drafts_total", COUNTER, "Rows that verified draft tokens."),
    MetricSpec("vllm:spec_decode_num_draft_tokens_total", COUNTER, "Draft tokens verified."),
    MetricSpec("vllm:spec_decode_num_accepted_tokens_total", COUNTER, "Draft tokens that the model chose itself."),
    MetricSpec(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        COUNTER,
        "Draft tokens that the model chose itself, by their place in the draft.",
        label=("position", DRAFT_POSITIONS),
    ),
    # Our own.
    MetricSpec(
        "inflight_request_time_per_output_token_seconds",
        HISTOGRAM,
        "Mean time per output token of a request in seconds.",
        _TPOT,
    ),
    MetricSpec(
        "inflight_requests_unsuccessful_total",
        COUNTER,
        "Requests that ended with an error, by the kind of it.",
        label=("reason", ENDINGS),
    ),
    MetricSpec(
        "inflight_pooled_total",
        COUNTER,
        "Texts that were embedded, scored or classified, by the task.",
        label=("task", POOLING_TASKS),
    ),
    MetricSpec("inflight_engine_deaths_total", COUNTER, "Times that the engine process died while serving."),
    MetricSpec("inflight_engine_restarts_total", COUNTER, "Times that the engine process was started again."),
    MetricSpec(
        "inflight_requests_replayed_total", COUNTER, "Requests of an engine process that died, given to the next one."
    ),
    MetricSpec("inflight_requests_running", GAUGE, "Sequences in the running batch."),
    MetricSpec("inflight_requests_waiting", GAUGE, "Sequences that wait for a slot or for blocks."),
    MetricSpec(
        "inflight_requests_preempted_total",
        COUNTER,
        "Sequences put back in the queue: blocks ran out, or more urgent ones arrived.",
    ),
    MetricSpec(
        "inflight_prompt_tokens_computed_total", COUNTER, "Prompt tokens computed, after a preemption once more."
    ),
    MetricSpec("inflight_kv_blocks_used", GAUGE, "KV blocks that sequences hold."),
    MetricSpec("inflight_kv_blocks_free", GAUGE, "KV blocks that are free or only cached."),
    MetricSpec("inflight_host_blocks_used", GAUGE, "KV blocks in host memory that hold swapped sequences."),
    MetricSpec("inflight_swapped_out_blocks_total", COUNTER, "KV blocks copied to host memory by preemption."),
    MetricSpec("inflight_swapped_in_blocks_total", COUNTER, "KV blocks copied back from host memory."),
    MetricSpec("inflight_kv_tier_bytes", GAUGE, "Bytes that a KV tier keeps.", engine_labels=("tier",)),
    MetricSpec(
        "inflight_kv_tier_load_seconds_sum",
        COUNTER,
        "Seconds that a KV tier took to read extents.",
        engine_labels=("tier",),
    ),
    MetricSpec("inflight_kv_tier_load_seconds_count", COUNTER, "Extents read from a KV tier.", engine_labels=("tier",)),
    MetricSpec("inflight_kv_tier_stored_total", COUNTER, "Extents that a KV tier took.", engine_labels=("tier",)),
    MetricSpec(
        "inflight_kv_tier_dropped_total",
        COUNTER,
        "Extents that were not written to a KV tier: too many waited.",
        engine_labels=("tier",),
    ),
    MetricSpec(
        "inflight_kv_tier_errors_total",
        COUNTER,
        "Reads and writes of a KV tier that failed, by the kind of failure.",
        engine_labels=("tier", "why"),
    ),
    MetricSpec("inflight_prefix_cache_queries_total", COUNTER, "Prompt tokens looked up in the prefix cache."),
    MetricSpec("inflight_prefix_cache_hits_total", COUNTER, "Prompt tokens served by the prefix cache."),
    MetricSpec(
        "inflight_steps_collected_first_total",
        COUNTER,
        "Steps launched only once the tokens of the step before were there, for a row whose rule reads them.",
    ),
    MetricSpec("inflight_kv_event_batches_total", COUNTER, "Batches of KV events given to the publishing thread."),
    MetricSpec(
        "inflight_kv_event_batches_dropped_total",
        COUNTER,
        "Batches of KV events dropped because max_queue_size of them waited; subscribers then begin anew.",
    ),
    MetricSpec("inflight_step_seconds", COUNTED, "Duration of an engine step in seconds.", _STEP),
    MetricSpec("inflight_batch_size", COUNTED, "Sequences in an engine step.", _POWERS),
    MetricSpec("inflight_scheduled_tokens", COUNTED, "Tokens in an engine step.", _POWERS),
)

# Of a model with `enable_lora`, which makes them as their labels come up (`adapter_metrics.py`).
ADAPTER_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "vllm:lora_requests_info", GAUGE, "Unix time of the last change of the adapters that run and wait, its labels."
    ),
    MetricSpec("inflight_adapter_requests", GAUGE, "Open requests with an adapter."),
    MetricSpec(
        "inflight_adapter_loads_total",
        COUNTER,
        "Loads of adapters while the model serves, by their outcome.",
        label=("outcome", ("loaded", "refused")),
    ),
    MetricSpec(
        "inflight_adapter_load_seconds", HISTOGRAM, "Time that the load of an adapter took, in seconds.", _LOADS
    ),
)
