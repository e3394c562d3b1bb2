"""Custom metrics on Triton's `/metrics`.  No torch.

A call to a Triton metric is a message to the server process (about 18 microseconds on Triton
24.10, measured), so none is made per token: `Metrics` gathers in plain Python, and a thread
publishes twice a second.  Triton's histograms take single values only; therefore

- `vllm:time_per_output_token_seconds` observes the mean of each request once, where vLLM observes
  every gap between two tokens;
- the step histograms observe at most `_MAX_STEPS` steps per publication, evenly picked: above 100
  steps a second their shape is right, but their count is that of the sample.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from inflight.engine.messages import StepStats

if TYPE_CHECKING:
    from inflight.frontend.open_stream import OpenStream

__all__ = ["METRICS", "MetricSpec", "Metrics", "NoMetrics", "buckets_1_2_5"]

_PERIOD_SECONDS = 0.5
_MAX_STEPS = 50
_MAX_KEPT = 10_000  # bounds the memory if publishing fails

COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"


class MetricSpec(NamedTuple):
    """A metric family; buckets are upper bounds, None if `max_model_len` determines them."""

    name: str
    kind: str
    description: str
    buckets: tuple[float, ...] | None = None


_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_E2E = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_POWERS = tuple(float(2**k) for k in range(13))

# The first eight are vllm_backend's, with its buckets.
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("vllm:prompt_tokens_total", COUNTER, "Number of prefill tokens processed."),
    MetricSpec("vllm:generation_tokens_total", COUNTER, "Number of generation tokens processed."),
    MetricSpec("vllm:time_to_first_token_seconds", HISTOGRAM, "Time to first token in seconds.", _LATENCY),
    MetricSpec(
        "vllm:time_per_output_token_seconds", HISTOGRAM, "Mean time per output token of a request in seconds.", _TPOT
    ),
    MetricSpec("vllm:e2e_request_latency_seconds", HISTOGRAM, "End to end request latency in seconds.", _E2E),
    MetricSpec("vllm:request_prompt_tokens", HISTOGRAM, "Number of prefill tokens of a request."),
    MetricSpec("vllm:request_generation_tokens", HISTOGRAM, "Number of generation tokens of a request."),
    MetricSpec("vllm:request_params_n", HISTOGRAM, "The n request parameter.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    MetricSpec("inflight_requests_running", GAUGE, "Sequences in the running batch."),
    MetricSpec("inflight_requests_waiting", GAUGE, "Sequences that wait for a slot or for blocks."),
    MetricSpec(
        "inflight_requests_preempted_total",
        COUNTER,
        "Sequences put back in the queue: blocks ran out, or more urgent ones arrived.",
    ),
    MetricSpec("inflight_kv_blocks_used", GAUGE, "KV blocks that sequences hold."),
    MetricSpec("inflight_kv_blocks_free", GAUGE, "KV blocks that are free or only cached."),
    MetricSpec("inflight_host_blocks_used", GAUGE, "KV blocks in host memory that hold swapped sequences."),
    MetricSpec("inflight_swapped_out_blocks_total", COUNTER, "KV blocks copied to host memory by preemption."),
    MetricSpec("inflight_swapped_in_blocks_total", COUNTER, "KV blocks copied back from host memory."),
    MetricSpec("inflight_prefix_cache_queries_total", COUNTER, "Prompt tokens looked up in the prefix cache."),
    MetricSpec("inflight_prefix_cache_hits_total", COUNTER, "Prompt tokens served by the prefix cache."),
    MetricSpec(
        "inflight_steps_collected_first_total",
        COUNTER,
        "Steps launched only once the tokens of the step before were there, for a row whose rule reads them.",
    ),
    MetricSpec("inflight_step_seconds", HISTOGRAM, "Duration of an engine step in seconds.", _STEP),
    MetricSpec("inflight_batch_size", HISTOGRAM, "Sequences in an engine step.", _POWERS),
    MetricSpec("inflight_scheduled_tokens", HISTOGRAM, "Tokens in an engine step.", _POWERS),
)


def buckets_1_2_5(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    steps = (factor * 10**power for power in range(len(str(limit))) for factor in (1, 2, 5))
    return [float(step) for step in steps if step <= limit]


class Metrics:
    """Gathers statistics and publishes them twice a second.

    `step`, `engine_down`, `first_token` and `finished` may be called by any thread, and only append to lists.

    Args:
        create: creates a Triton metric from a spec and its buckets.
        max_model_len: upper bound of the token count histograms.
    """

    def __init__(self, create: Callable[[MetricSpec, list[float] | None], Any], max_model_len: int) -> None:
        lengths = buckets_1_2_5(max_model_len)
        self._metrics: dict[str, Any] = {}
        for spec in METRICS:
            buckets = None if spec.kind != HISTOGRAM else list(spec.buckets or lengths)
            self._metrics[spec.name] = create(spec, buckets)
        self._lock = threading.Lock()  # guards the four below
        self._observations: deque[tuple[str, float]] = deque(maxlen=_MAX_KEPT)
        self._steps: deque[StepStats] = deque(maxlen=_MAX_KEPT)
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._last: StepStats | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish what is left and end the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def step(self, stats: StepStats, num_output_tokens: int) -> None:
        """One engine step."""
        with self._lock:
            self._steps.append(stats)
            self._prompt_tokens += stats.prompt_tokens
            self._output_tokens += num_output_tokens

    def engine_down(self) -> None:
        """The engine process is gone with all it held; the next one counts from 0."""
        with self._lock:
            last = self._steps[-1] if self._steps else self._last
            if last is not None:
                nothing: dict[str, int] = dict.fromkeys(StepStats.__struct_fields__, 0)
                nothing["blocks_free"] = last.blocks_used + last.blocks_free
                self._steps.append(StepStats(**nothing))

    def first_token(self, seconds: float) -> None:
        """A request got its first token, so many seconds after it arrived."""
        self._observe(("vllm:time_to_first_token_seconds", seconds))

    def finished(self, stream: OpenStream) -> None:
        """A request ended by itself."""
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
            found.append(("vllm:time_per_output_token_seconds", gap))
        self._observe(*found)

    def _observe(self, *observations: tuple[str, float]) -> None:
        with self._lock:
            self._observations += observations

    def _loop(self) -> None:
        while not self._stopping.wait(_PERIOD_SECONDS):
            self.publish()
        self.publish()

    def publish(self) -> None:
        """Send what was gathered since the last publication."""
        with self._lock:
            steps, observations = list(self._steps), list(self._observations)
            self._steps.clear()
            self._observations.clear()
            counted = {
                "vllm:prompt_tokens_total": self._prompt_tokens,
                "vllm:generation_tokens_total": self._output_tokens,
            }
            self._prompt_tokens = self._output_tokens = 0
        for name, value in observations:
            self._metrics[name].observe(value)
        if not steps:
            return
        now = steps[-1]
        self._publish_counters(counted, now)
        for name, value in (
            ("inflight_requests_running", now.running),
            ("inflight_requests_waiting", now.waiting),
            ("inflight_kv_blocks_used", now.blocks_used),
            ("inflight_kv_blocks_free", now.blocks_free),
            ("inflight_host_blocks_used", now.host_blocks_used),
        ):
            self._metrics[name].set(value)
        stride = -(-len(steps) // _MAX_STEPS)
        for stats in steps[::stride]:
            if stats.batch_size:  # an empty step only reports the state
                self._metrics["inflight_step_seconds"].observe(stats.step_seconds)
                self._metrics["inflight_batch_size"].observe(stats.batch_size)
                self._metrics["inflight_scheduled_tokens"].observe(stats.scheduled_tokens)

    def _publish_counters(self, counted: dict[str, int], now: StepStats) -> None:
        last, self._last = self._last, now
        for name, field in (
            ("inflight_requests_preempted_total", "preempted_total"),
            ("inflight_swapped_out_blocks_total", "swapped_out_total"),
            ("inflight_swapped_in_blocks_total", "swapped_in_total"),
            ("inflight_prefix_cache_queries_total", "prefix_queries_total"),
            ("inflight_prefix_cache_hits_total", "prefix_hits_total"),
            ("inflight_steps_collected_first_total", "collected_first_total"),
        ):
            value, before = getattr(now, field), getattr(last, field, 0)
            counted[name] = value - before if value >= before else value  # a new engine counts from 0
        for name, amount in counted.items():
            if amount:
                self._metrics[name].increment(amount)


class NoMetrics:
    """Takes the same calls as `Metrics` and publishes nothing."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def step(self, stats: StepStats, num_output_tokens: int) -> None: ...
    def engine_down(self) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def finished(self, stream: OpenStream) -> None: ...
