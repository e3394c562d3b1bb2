from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.deltas import SequenceDelta, StepStats, TierStats, TierTotals, TokenColumns
from inflight.engine.logprobs import Logprobs
from inflight.engine.messages import EngineReady, StepMessage
from inflight.frontend.operator import metrics as module
from inflight.frontend.operator.histograms import CountedHistogram, TokenGaps
from inflight.frontend.operator.metric_specs import COUNTED, ENDINGS, HISTOGRAM, METRICS, MetricSpec, buckets_1_2_5
from inflight.frontend.operator.metrics import Metrics


class Recorder:
    def __init__(self, spec: MetricSpec, labels: dict[str, str], buckets: list[float] | None) -> None:
        self.spec, self.labels, self.buckets = spec, labels, buckets
        self.value = 0.0
        self.observed: list[float] = []
        self.calls = 0

    def increment(self, value: float) -> None:
        assert self.spec.kind == "COUNTER"
        assert value > 0
        self.value += value
        self.calls += 1

    def set(self, value: float) -> None:
        assert self.spec.kind == "GAUGE"
        self.value = value
        self.calls += 1

    def observe(self, value: float) -> None:
        assert self.spec.kind == "HISTOGRAM"
        self.observed.append(value)
        self.calls += 1


def name_of(spec: MetricSpec, labels: dict[str, str]) -> str:
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return spec.name + (f"{{{text}}}" if text else "")


class Rig:
    """Metrics and what reached Triton; series are named as on /metrics."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: dict[str, Recorder] = {}
        self.metrics = Metrics(self.create, 2048, lambda: self.now)

    def create(self, spec: MetricSpec, labels: dict[str, str], buckets: list[float] | None) -> Recorder:
        name = name_of(spec, labels)
        assert name not in self.made, "created twice"
        self.made[name] = Recorder(spec, labels, buckets)
        return self.made[name]

    def __getitem__(self, name: str) -> float:
        return self.made[name].value

    @property
    def nonzero(self) -> dict[str, float]:
        return {name: recorder.value for name, recorder in self.made.items() if recorder.value}

    def step(
        self,
        *deltas: SequenceDelta,
        at: float = 0.0,
        open_ids: Any = (1, 2, 3),
        tokens: Any = (),
        leads: bool = True,
        **changes: Any,
    ) -> None:
        columns = TokenColumns(*map(list, zip(*((i, k, 7) for i, k in tokens)))) if tokens else TokenColumns()
        self.metrics.step(StepMessage(list(deltas), stats(**changes), columns, leads=leads), at, open_ids)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def stats(**changes: Any) -> StepStats:
    fields = dict.fromkeys(StepStats.__struct_fields__, 0) | {"batch_size": 2, "step_seconds": 0.5, **changes}
    return StepStats(**fields)  # type: ignore[arg-type]


def ready(num_blocks: int, leads: bool = True) -> EngineReady:
    return EngineReady(2048, 100, [0], num_blocks, 16, "float32", "cpu", "fake", 0.1, leads)


def first(request_id: int, index: int = 0) -> SequenceDelta:
    return SequenceDelta(request_id, index, [7], num_cached_tokens=0)


def stream(num_output: int, n: int = 1, seconds: float = 3.0, reason: str | None = "stop") -> Any:
    engine_request = SimpleNamespace(prompt_token_ids=[1, 2, 3], params=SimpleNamespace(n=n), attached=None)
    sequence = SimpleNamespace(num_generated_tokens=num_output, ended=reason is not None, finish_reason=reason)
    return SimpleNamespace(
        request_id=1,
        request=SimpleNamespace(engine_request=engine_request),
        arrival=10.0,
        num_output_tokens=num_output * n,
        sequences=[sequence] * n,
        first_token_time=11.0,
        end_time=10.0 + seconds,
    )


def test_vllm_backends_metrics_come_first_with_its_buckets(rig: Rig) -> None:
    assert [spec.name for spec in METRICS][:8] == [
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_params_n",
    ]
    assert rig.made["vllm:request_prompt_tokens"].buckets == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert all((r.buckets is not None) == (r.spec.kind == HISTOGRAM) for r in rig.made.values())
    assert all(spec.buckets for spec in METRICS if spec.kind == COUNTED)


def test_what_gateways_and_autoscalers_read(rig: Rig) -> None:
    rig.metrics.engine_ready(ready(40), again=False)
    rig.step(running=3, waiting=5, blocks_used=10, blocks_free=30, preempted_total=2)
    rig.step(running=3, waiting=4, blocks_used=10, blocks_free=30, preempted_total=2, prefix_queries_total=9)
    rig.metrics.finished(stream(4, n=2))
    rig.metrics.finished(stream(4, reason="length"))
    rig.metrics.unsuccessful("cancelled", stream(4, n=3, reason=None))
    rig.metrics.unsuccessful("failed", stream(4, reason=None))
    rig.metrics.unsuccessful("refused")
    rig.metrics.publish()
    assert {name: value for name, value in rig.nonzero.items() if name.startswith("vllm:")} == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 4,
        "vllm:kv_cache_usage_perc": 0.25,
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="40"}': 1,
        "vllm:num_preemptions_total": 2,
        "vllm:prefix_cache_queries_total": 9,
        'vllm:request_success_total{finished_reason="stop"}': 2,
        'vllm:request_success_total{finished_reason="length"}': 1,
        'vllm:request_success_total{finished_reason="abort"}': 3,
        'vllm:request_success_total{finished_reason="error"}': 1,
    }


def test_steps_become_gauges_and_counters(rig: Rig) -> None:
    rig.step(prompt_tokens=5, running=1, blocks_used=3, blocks_free=7, prefix_hits_total=4)
    rig.step(tokens=[(1, 0), (2, 0)], running=2, waiting=6, preempted_total=1, prefix_hits_total=6)
    rig.metrics.publish()
    assert rig["inflight_requests_waiting"] == 6
    rig.step(
        tokens=[(1, 0), (2, 0)], prefix_hits_total=7, preempted_total=1, swapped_out_total=8, collected_first_total=3
    )
    rig.metrics.publish()
    calls = sum(recorder.calls for recorder in rig.made.values())
    rig.metrics.publish()
    assert sum(recorder.calls for recorder in rig.made.values()) == calls, "nothing new, nothing sent"
    ours = {name: v for name, v in rig.nonzero.items() if "_bucket" not in name and name.startswith("inflight")}
    assert ours == {
        "inflight_requests_preempted_total": 1,
        "inflight_prompt_tokens_computed_total": 5,
        "inflight_swapped_out_blocks_total": 8,
        "inflight_prefix_cache_hits_total": 7,
        "inflight_steps_collected_first_total": 3,
        "inflight_step_seconds_sum": 1.5,
        "inflight_step_seconds_count": 3,
        "inflight_batch_size_sum": 6,
        "inflight_batch_size_count": 3,
        "inflight_scheduled_tokens_count": 3,
    }
    assert rig["vllm:generation_tokens_total"] == 4


def test_counters_continue_when_a_new_engine_counts_from_zero(rig: Rig) -> None:
    for total in (10, 12, 3, 4):
        rig.step(prefix_queries_total=total)
        rig.metrics.publish()
    assert rig["inflight_prefix_cache_queries_total"] == 16


def test_a_request_is_observed_once(rig: Rig) -> None:
    rig.metrics.first_token(stream(5, n=2))
    rig.metrics.finished(stream(5, n=2))
    rig.metrics.publish()
    assert {name: recorder.observed for name, recorder in rig.made.items() if recorder.observed} == {
        "vllm:time_to_first_token_seconds": [1.0],
        "inflight_request_time_per_output_token_seconds": [0.5],
        "vllm:e2e_request_latency_seconds": [3.0],
        "vllm:request_prompt_tokens": [3.0],
        "vllm:request_generation_tokens": [10.0],
        "vllm:request_params_n": [2.0],
    }


def test_a_prompt_counts_once_with_its_cached_tokens_whatever_is_computed(rig: Rig) -> None:
    rig.step(prompt_tokens=1)  # the rest was cached
    rig.metrics.first_token(stream(1, n=4))
    rig.step(prompt_tokens=3)  # after a preemption
    rig.metrics.publish()
    assert rig["vllm:prompt_tokens_total"] == 3
    assert rig["inflight_prompt_tokens_computed_total"] == 4


def test_a_single_token_has_no_mean(rig: Rig) -> None:
    rig.metrics.finished(stream(1))
    rig.metrics.publish()
    assert rig.made["inflight_request_time_per_output_token_seconds"].observed == []


@pytest.mark.parametrize("ending", ENDINGS)
def test_how_requests_end_is_counted(rig: Rig, ending: str) -> None:
    rig.metrics.unsuccessful(ending)
    rig.metrics.unsuccessful(ending, stream(1, reason=None))
    rig.metrics.settle()
    assert rig[f'inflight_requests_unsuccessful_total{{reason="{ending}"}}'] == 2


def test_every_gap_between_two_tokens_is_observed(rig: Rig) -> None:
    rig.step(first(1), first(2), at=10.0)
    rig.step(tokens=[(1, 0)], at=10.02)  # 2 sits out a step
    rig.step(SequenceDelta(1, 0, [7, 7, 7]), tokens=[(2, 0)], at=10.3)  # drafts: one gap
    rig.step(SequenceDelta(1, 0, [7], "length"), SequenceDelta(2, 0, [7]), at=10.4)
    rig.metrics.publish()
    for name in ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"):
        assert rig[name + "_count"] == 5
        assert rig[name + "_sum"] == pytest.approx(0.02 + 0.28 + 0.3 + 0.1 + 0.1)
        bucket = {r.labels["le"]: r.value for key, r in rig.made.items() if key.startswith(name + "_bucket")}
        assert [bucket[le] for le in ("0.01", "0.025", "0.1", "0.15", "0.3", "2.5", "+Inf")] == [
            0, 1, pytest.approx(bucket["0.1"]), 3, bucket["0.3"], 5, 5,
        ]  # fmt: skip


class TestTokenGaps:
    def test_sequences_of_a_step_may_have_waited_differently(self) -> None:
        gaps = TokenGaps()
        gaps.take(StepMessage([first(1), first(1, 1)], stats()), 1.0, {1})
        assert gaps.take(StepMessage([], stats(), TokenColumns([1], [0], [7])), 2.0, {1}) == [(1.0, 1)]
        both = gaps.take(StepMessage([], stats(), TokenColumns([1, 1], [0, 1], [7, 7])), 4.0, {1})
        assert sorted(both) == [(2.0, 1), (3.0, 1)]

    def test_nothing_is_remembered_of_what_ended(self) -> None:
        gaps = TokenGaps()
        gaps.take(StepMessage([first(1), first(2), first(3), first(4)], stats()), 1.0, {1, 2, 3})
        gaps.take(StepMessage([SequenceDelta(1, 0, [7], "stop")], stats()), 2.0, {1, 2, 3})
        gaps.forget(2, 1)
        late = StepMessage([SequenceDelta(2, 0, [7])], stats(), TokenColumns([1, 4], [0, 0], [7, 7]))
        assert gaps.take(late, 3.0, {3}) == []
        assert list(gaps._last) == [(3, 0)]
        gaps.clear()
        assert not gaps._last

    def test_a_delta_without_tokens_is_no_gap(self) -> None:
        gaps = TokenGaps()
        gaps.take(StepMessage([first(1)], stats()), 1.0, {1})
        assert gaps.take(StepMessage([SequenceDelta(1, 0, [], prompt_logprobs=Logprobs([0]))], stats()), 2.0, {1}) == []


def test_a_bound_includes_what_is_equal_to_it() -> None:
    histogram = CountedHistogram([1.0, 2.0])
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4), (9.0, 5)):
        histogram.add(value, count)
    assert histogram.take() == ([3, 10, 15], pytest.approx(60.0))
    assert histogram.take() == ([0, 0, 0], 0.0)


def test_every_step_is_counted(rig: Rig) -> None:
    for number in range(1000):
        rig.step(scheduled_tokens=number)
    rig.metrics.publish()
    assert rig["inflight_scheduled_tokens_count"] == 1000
    assert rig['inflight_scheduled_tokens_bucket{le="512"}'] == 513


def test_empty_steps_update_only_the_gauges(rig: Rig) -> None:
    rig.step(batch_size=0, blocks_free=9)
    rig.metrics.publish()
    assert rig.nonzero == {"inflight_kv_blocks_free": 9}


def test_an_answer_is_settled_with_everything_while_that_costs_little(rig: Rig, monkeypatch: Any) -> None:
    """Publishing takes 1 ms here, so that it may happen every 50 ms; what requests add to is not bounded so."""
    publish_steps = rig.metrics._publish_steps

    def slow() -> None:
        publish_steps()
        rig.now += 0.001

    monkeypatch.setattr(rig.metrics, "_publish_steps", slow)
    running, seen = "inflight_requests_running", []
    for number in range(1, 5):
        rig.step(running=number)
        rig.metrics.finished(stream(1))
        rig.metrics.settle()
        assert rig['vllm:request_success_total{finished_reason="stop"}'] == number
        seen.append(rig[running])
        rig.now += 0.02
    assert seen == [1, 1, 1, 4]
    rig.step(running=9)
    rig.metrics.publish()
    assert rig[running] == 9


def test_counts_missing_at_an_answer_are_published_before_the_next_period(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_PERIOD_SECONDS", 3600.0)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    rig = Rig()
    published = threading.Event()
    publish = rig.metrics.publish
    monkeypatch.setattr(rig.metrics, "publish", lambda: (publish(), published.set()))
    rig.metrics._next_steps = 1.0
    rig.metrics.start()
    rig.step(running=5)
    rig.metrics.settle()
    assert published.wait(20)
    assert rig["inflight_requests_running"] == 5
    rig.metrics.stop()


def test_stop_publishes_what_is_left(rig: Rig) -> None:
    rig.metrics.start()
    rig.step(tokens=[(1, 0)] * 3)
    rig.metrics.stop()
    assert rig["vllm:generation_tokens_total"] == 3


def test_buckets() -> None:
    assert buckets_1_2_5(100) == [1, 2, 5, 10, 20, 50, 100]
    assert buckets_1_2_5(1) == [1]


def test_gauges_fall_when_the_engine_dies(rig: Rig) -> None:
    rig.metrics.engine_down()  # before its first step
    rig.step(first(1), running=30, waiting=4, blocks_used=90, blocks_free=10, host_blocks_used=3, preempted_total=5)
    rig.metrics.publish()
    rig.metrics.engine_down()
    rig.metrics.publish()
    gauges = {name: recorder.value for name, recorder in rig.made.items() if recorder.spec.kind == "GAUGE"}
    assert gauges.pop("inflight_kv_blocks_free") == 100
    assert set(gauges.values()) == {0}
    rig.metrics.engine_ready(ready(40), again=True)
    rig.step(preempted_total=2, tokens=[(1, 0)])  # by the next engine
    rig.metrics.publish()
    assert rig["inflight_requests_preempted_total"] == rig["vllm:num_preemptions_total"] == 7
    assert rig["inflight_batch_size_count"] == 2
    assert (rig["inflight_engine_deaths_total"], rig["inflight_engine_restarts_total"]) == (2, 1)
    assert rig["vllm:inter_token_latency_seconds_count"] == 0, "the time between two engines is no gap"


def test_only_the_latest_pool_size_is_published(rig: Rig) -> None:
    for number, blocks in enumerate((40, 50, 50, 40)):
        rig.metrics.engine_ready(ready(blocks), again=number > 0)
        rig.metrics.publish()
        name = 'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{}"}}'
        assert rig[name.format(blocks)] == 1
        assert sum(r.value for key, r in rig.made.items() if "cache_config" in key) == 1
    assert rig["inflight_engine_restarts_total"] == 3


def test_one_of_two_frontends_publishes_the_engines_counts(rig: Rig) -> None:
    other = Rig()
    rig.metrics.engine_ready(ready(40), again=False)
    other.metrics.engine_ready(ready(40, leads=False), again=False)
    counts = {"preempted_total": 2, "prompt_tokens": 5, "running": 3, "blocks_used": 9, "blocks_free": 31}
    rig.step(first(1), **counts)
    other.step(first(2), leads=False, **counts)
    other.metrics.finished(stream(1))
    other.metrics.publish()
    rig.metrics.publish()
    assert set(other.nonzero) == {"vllm:generation_tokens_total", 'vllm:request_success_total{finished_reason="stop"}'}
    assert rig["inflight_prompt_tokens_computed_total"] == 5
    assert rig["inflight_requests_preempted_total"] == 2

    other.step(leads=False, batch_size=0, preempted_total=6, running=1)  # all that the other one had counted
    other.step(preempted_total=7, running=1, prompt_tokens=1)
    other.metrics.publish()
    assert (other["inflight_requests_preempted_total"], other["inflight_requests_running"]) == (1, 1)
    assert (other["inflight_prompt_tokens_computed_total"], other["inflight_batch_size_count"]) == (1, 1)


def test_drafts_are_summed_over_engines_and_by_position(rig: Rig) -> None:
    rig.step()
    rig.metrics.publish()
    names = [f"vllm:spec_decode_num_{kind}_total" for kind in ("drafts", "draft_tokens", "accepted_tokens")]
    at = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}}'
    assert [rig[name] for name in (*names, at.format(0))] == [0] * 4
    rig.step(draft_totals=[2, 9, 5, 2, 2, 1, 0])
    rig.step(draft_totals=[3, 12, 6, 3, 2, 1, 0])
    rig.metrics.engine_down()
    rig.step(draft_totals=[1, 3, 3, 1, 1, 1, 0])  # by the next engine
    rig.step(draft_totals=[1, 3, 3, 1, 1, 1, 0])
    rig.metrics.publish()
    assert [rig[name] for name in names] == [4, 15, 9]
    assert [rig[at.format(place)] for place in range(5)] == [4, 3, 2, 0, 0]


def test_a_death_and_a_restart_are_counted_once(rig: Rig) -> None:
    other = Rig()
    rig.metrics.engine_ready(ready(40), again=False)
    other.metrics.engine_ready(ready(40, leads=False), again=False)
    for each in (rig, other):
        each.metrics.engine_down()
    rig.metrics.engine_ready(ready(40, leads=False), again=True)  # the other one was there first
    other.metrics.engine_ready(ready(40), again=True)
    for each in (rig, other):
        each.metrics.publish()
    assert [each["inflight_engine_deaths_total"] for each in (rig, other)] == [1, 0]
    assert [each["inflight_engine_restarts_total"] for each in (rig, other)] == [0, 1]


def test_an_instance_that_leaves_zeroes_its_gauges_and_the_next_one_sets_them_again(monkeypatch: Any) -> None:
    """Both write the same Triton metrics, and during a reload the old one leaves after the new one has come."""
    monkeypatch.setattr(module, "_PERIOD_SECONDS", 0.01)
    old, new = Rig(), Rig()
    new.made = old.made
    new.metrics = Metrics(lambda spec, labels, buckets: old.made[name_of(spec, labels)], 2048)
    for rig in (old, new):
        rig.metrics.engine_ready(ready(40), again=False)
        rig.step(running=3, blocks_used=10, blocks_free=30)
    old.metrics.publish()
    new.metrics.publish()
    info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="40"}'
    old.metrics.stop()
    assert {name for name, recorder in old.made.items() if recorder.spec.kind == "GAUGE" and recorder.value} == set()
    counted = old["inflight_batch_size_count"]
    new.metrics.start()
    deadline = time.monotonic() + 20
    while not (old["inflight_kv_blocks_free"] == 30 and old[info] == 1):
        assert time.monotonic() < deadline, "the gauges of the new instance did not come back"
        time.sleep(0.005)
    new.metrics.stop()
    assert old["inflight_kv_blocks_free"] == old[info] == 0
    assert counted == old["inflight_batch_size_count"] == 2, "counters go on"


def test_each_kv_tier_has_its_metrics_once_the_engine_has_it(rig: Rig) -> None:
    def totals(hits: int, loaded: int, errors: dict[str, int]) -> TierTotals:
        disk = TierStats("disk", True, 3000, loaded / 8, loaded, 20, 1, errors)
        return TierTotals(100, hits, [disk, TierStats("redis-2", False, 0, 0.0, 0, 0, 0, {})])

    rig.step(kv_tiers=None)
    rig.metrics.publish()
    assert not any("kv_tier" in name for name in rig.made)
    rig.step(kv_tiers=totals(40, 8, {"corrupt": 2}))
    rig.step(kv_tiers=totals(60, 12, {"corrupt": 2, "io": 1}))
    rig.metrics.engine_down()
    rig.step(kv_tiers=totals(5, 4, {"io": 1}))
    rig.metrics.publish()
    assert {name: value for name, value in rig.nonzero.items() if "tier" in name or "external" in name} == {
        "vllm:external_prefix_cache_queries_total": 200,
        "vllm:external_prefix_cache_hits_total": 65,
        'inflight_kv_tier_bytes{tier="disk"}': 3000,
        'inflight_kv_tier_load_seconds_sum{tier="disk"}': 2.0,
        'inflight_kv_tier_load_seconds_count{tier="disk"}': 16,
        'inflight_kv_tier_stored_total{tier="disk"}': 40,
        'inflight_kv_tier_dropped_total{tier="disk"}': 2,
        'inflight_kv_tier_errors_total{tier="disk",why="corrupt"}': 2,
        'inflight_kv_tier_errors_total{tier="disk",why="io"}': 2,
    }
    rig.metrics.stop()
    assert rig['inflight_kv_tier_bytes{tier="disk"}'] == 0
