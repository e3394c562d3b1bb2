from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inflight.engine.messages import StepStats
from inflight.frontend.metrics import METRICS, Metrics, MetricSpec, buckets_1_2_5


class Recorder:
    def __init__(self, spec: MetricSpec, buckets: list[float] | None) -> None:
        self.spec = spec
        self.buckets = buckets
        self.value = 0.0
        self.observed: list[float] = []

    def increment(self, value: float) -> None:
        assert self.spec.kind == "COUNTER"
        assert value > 0
        self.value += value

    def set(self, value: float) -> None:
        assert self.spec.kind == "GAUGE"
        self.value = value

    def observe(self, value: float) -> None:
        assert self.spec.kind == "HISTOGRAM"
        self.observed.append(value)


def recorded() -> tuple[Metrics, dict[str, Recorder]]:
    made: dict[str, Recorder] = {}

    def create(spec: MetricSpec, buckets: list[float] | None) -> Recorder:
        made[spec.name] = Recorder(spec, buckets)
        return made[spec.name]

    return Metrics(create, 2048), made


def stats(**changes: Any) -> StepStats:
    fields = dict.fromkeys(StepStats.__struct_fields__, 0) | {"batch_size": 2, "step_seconds": 0.5, **changes}
    return StepStats(**fields)  # type: ignore[arg-type]


def finished(num_output: int, n: int = 1, seconds: float = 3.0) -> Any:
    engine_request = SimpleNamespace(prompt_token_ids=[1, 2, 3], params=SimpleNamespace(n=n))
    return SimpleNamespace(
        request=SimpleNamespace(engine_request=engine_request),
        arrival=10.0,
        num_output_tokens=num_output * n,
        sequences=[SimpleNamespace(num_generated_tokens=num_output)] * n,
        first_token_time=11.0,
        end_time=10.0 + seconds,
    )


def test_vllm_backends_metrics_come_first_with_its_buckets() -> None:
    _, made = recorded()
    assert list(made)[:8] == [
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_params_n",
    ]
    assert made["vllm:request_prompt_tokens"].buckets == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert all(
        (recorder.buckets is not None) == (spec.kind == "HISTOGRAM") for spec, recorder in zip(METRICS, made.values())
    )


def test_steps_become_gauges_counters_and_histograms() -> None:
    metrics, made = recorded()
    metrics.step(stats(prompt_tokens=5, running=1, blocks_used=3, blocks_free=7, prefix_hits_total=4), 0)
    metrics.step(stats(prompt_tokens=0, running=2, waiting=6, preempted_total=1, prefix_hits_total=6), 2)
    metrics.publish()
    metrics.step(stats(prefix_hits_total=7, preempted_total=1, swapped_out_total=8, collected_first_total=3), 2)
    metrics.publish()
    metrics.publish()
    values = {name: recorder.value for name, recorder in made.items() if recorder.spec.kind != "HISTOGRAM"}
    assert values == {
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 4,
        "inflight_requests_running": 0,
        "inflight_requests_waiting": 0,
        "inflight_requests_preempted_total": 1,
        "inflight_kv_blocks_used": 0,
        "inflight_kv_blocks_free": 0,
        "inflight_host_blocks_used": 0,
        "inflight_swapped_out_blocks_total": 8,
        "inflight_swapped_in_blocks_total": 0,
        "inflight_prefix_cache_queries_total": 0,
        "inflight_prefix_cache_hits_total": 7,
        "inflight_steps_collected_first_total": 3,
    }
    assert made["inflight_step_seconds"].observed == [0.5] * 3


def test_counters_continue_when_a_new_engine_counts_from_zero() -> None:
    metrics, made = recorded()
    for total in (10, 12, 3, 4):
        metrics.step(stats(prefix_queries_total=total), 1)
        metrics.publish()
    assert made["inflight_prefix_cache_queries_total"].value == 16


def test_a_finished_request_is_observed_once() -> None:
    metrics, made = recorded()
    metrics.first_token(1.0)
    metrics.finished(finished(num_output=5, n=2))
    metrics.publish()
    seen = {name: recorder.observed for name, recorder in made.items() if recorder.observed}
    assert seen == {
        "vllm:time_to_first_token_seconds": [1.0],
        "vllm:time_per_output_token_seconds": [0.5],
        "vllm:e2e_request_latency_seconds": [3.0],
        "vllm:request_prompt_tokens": [3.0],
        "vllm:request_generation_tokens": [10.0],
        "vllm:request_params_n": [2.0],
    }


def test_a_single_token_has_no_time_per_output_token() -> None:
    metrics, made = recorded()
    metrics.finished(finished(num_output=1))
    metrics.publish()
    assert made["vllm:time_per_output_token_seconds"].observed == []


def test_step_histograms_sample_when_steps_are_many() -> None:
    metrics, made = recorded()
    for number in range(1000):
        metrics.step(stats(scheduled_tokens=number), 1)
    metrics.publish()
    observed = made["inflight_scheduled_tokens"].observed
    assert len(observed) == 50
    assert observed == list(range(0, 1000, 20))


def test_empty_steps_update_only_the_gauges() -> None:
    metrics, made = recorded()
    metrics.step(stats(batch_size=0, blocks_free=9), 0)
    metrics.publish()
    assert made["inflight_kv_blocks_free"].value == 9
    assert made["inflight_batch_size"].observed == []


def test_stop_publishes_what_is_left() -> None:
    metrics, made = recorded()
    metrics.start()
    metrics.step(stats(), 3)
    metrics.stop()
    assert made["vllm:generation_tokens_total"].value == 3


def test_buckets() -> None:
    assert buckets_1_2_5(100) == [1, 2, 5, 10, 20, 50, 100]
    assert buckets_1_2_5(1) == [1]


def test_gauges_fall_when_the_engine_dies() -> None:
    metrics, made = recorded()
    metrics.engine_down()  # before its first step
    metrics.step(stats(running=30, waiting=4, blocks_used=90, blocks_free=10, host_blocks_used=3, preempted_total=5), 1)
    metrics.publish()
    metrics.engine_down()
    metrics.publish()
    gauges = {name: recorder.value for name, recorder in made.items() if recorder.spec.kind == "GAUGE"}
    assert gauges.pop("inflight_kv_blocks_free") == 100
    assert set(gauges.values()) == {0}
    metrics.step(stats(preempted_total=2), 0)  # by the next engine
    metrics.publish()
    assert made["inflight_requests_preempted_total"].value == 7
    assert len(made["inflight_batch_size"].observed) == 2
