"""The simulator runs the real core: steps, times and counts that can be worked out by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from simulated import PROFILE, engine, job, simulate

from inflight.config import ConfigError
from inflight.engine.policies.cost_model import StepCost
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.report import summarise, table
from inflight_tools.workload.slo import SLO


def test_a_known_comparison_of_static_and_continuous_batching():
    """100 requests, outputs lognormal(4.0, 0.8) in 10..500, 8 at a time."""
    drawn = np.random.RandomState(123).lognormal(4.0, 0.8, 100)
    outputs = np.clip(drawn, 10, 500).astype(int).tolist()
    static = sum(max(outputs[first : first + 8]) for first in range(0, 100, 8))
    replica = engine(max_num_seqs=8)
    outcome = simulate([replica], [job(i, 1, output) for i, output in enumerate(outputs)])
    assert static == 2722
    assert replica.steps == 1148
    assert outcome.seconds == 1148
    assert round(static / replica.steps, 2) == 2.37
    assert [request.tokens for request in outcome.requests] == outputs


def test_times_follow_from_the_steps():
    # a prompt of 8 tokens in chunks of 4, then its first token; another one arrives while the first decodes
    replica = engine(max_num_batched_tokens=4)
    outcome = simulate([replica], [job(0, 8, 4, 0.0), job(1, 2, 2, 2.5)])
    first, second = outcome.requests
    assert (first.ttft, first.last, first.tpot) == (2.0, 5.0, 1.0)
    assert (second.ttft, second.last) == (1.5, 5.0), "it joins the step that begins at 3"
    assert sorted(outcome.gaps) == [1.0] * 4
    assert replica.steps == 5


def test_the_host_waits_for_the_device_unless_steps_overlap():
    device, host = StepCost.linear(fixed=1.0), StepCost.linear(fixed=0.25)
    jobs = [job(0, 1, 10)]
    apart = simulate([engine(device, host)], jobs)
    overlapped = simulate([engine(device, host, async_scheduling=True)], jobs)
    assert apart.seconds == 10 * 1.25
    assert overlapped.seconds == 0.25 + 10
    slow_host = simulate([engine(device, StepCost.linear(fixed=2.0), async_scheduling=True)], jobs)
    assert 2.0 * 10 <= slow_host.seconds <= 2.0 * 11 + 1.0, "the slower of the two sets the pace"


SUFFIX = {"method": "suffix"}
READS_WEIGHTS = StepCost.linear(fixed=0.01, per_prefill_token=0.0001)


def test_drafts_that_are_accepted_save_steps():
    for overlap in [False, True]:
        for accepted in [0.0, 0.7, 1.0]:
            jobs = [job(0, 40, 400), job(1, 3, 300, 2.0)]
            options = {"speculative_config": SUFFIX, "async_scheduling": overlap}
            plain = simulate([engine(READS_WEIGHTS)], jobs)
            drafted = simulate([engine(READS_WEIGHTS, accepted_drafts=accepted, **options)], jobs)
            assert [request.tokens for request in drafted.requests] == [400, 300]
            counts = drafted.replicas[0].scheduler.policies.draft_counts
            if accepted:
                share = counts.accepted / counts.tokens
                assert share == 1 if accepted == 1 else 0 < share < 0.7, (
                    "all tokens after a refused one are refused, too"
                )
                assert drafted.seconds < 0.7 * plain.seconds
            else:
                assert counts.tokens and not counts.accepted
                assert drafted.seconds < 1.05 * plain.seconds
            report = summarise(drafted, SLO(1.0, 1.0))
            assert (report.drafts, report.draft_tokens, report.accepted_tokens) == (
                counts.drafts,
                counts.tokens,
                counts.accepted,
            )
            assert report.sequences_per_step <= 2
            assert f"drafts        {counts.drafts} of " in table(report, SLO(1.0, 1.0))


def test_simulated_drafts_are_the_same_each_time():
    jobs = [job(i, 40, 200, 0.1 * i) for i in range(6)]
    runs = [simulate([engine(READS_WEIGHTS, accepted_drafts=0.6, speculative_config=SUFFIX)], jobs) for _ in range(2)]
    assert runs[0].gaps == runs[1].gaps


def test_a_load_without_text_is_simulated_without_drafts():
    jobs = [job(0, 40, 200), job(1, 3, 50, 2.0)]
    plain = simulate([engine()], jobs)
    drafted = simulate([engine(speculative_config={"method": "suffix"})], jobs)
    assert [(r.ttft, r.last, r.tokens) for r in drafted.requests] == [
        (r.ttft, r.last, r.tokens) for r in plain.requests
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_latency_target_holds_on_the_virtual_clock(overlap):
    """Streams at 20 ms per step and a long prompt at 1 ms per token: chunks grow to what the target allows."""
    device, host = StepCost.linear(fixed=0.020, per_prefill_token=0.001), StepCost.linear(fixed=0.001)
    jobs = [*(job(i, 4, 400, 0.0) for i in range(4)), job(4, 3000, 2, 2.0)]
    options = {"max_num_batched_tokens": 512, "async_scheduling": overlap}
    static = simulate([engine(device, host, **options)], jobs)
    kept = simulate([engine(device, host, itl_target_ms=100.0, **options)], jobs)
    assert max(static.gaps) > 0.5
    assert 0.08 < max(kept.gaps) <= 0.101
    assert kept.requests[4].ttft < 1.5 * static.requests[4].ttft


def test_a_closed_loop_keeps_its_users_busy_and_no_more():
    replica = engine()
    outcome = simulate([replica], [job(i, 1, 5) for i in range(7)], users=3)
    arrivals = [request.arrival for request in outcome.requests]
    assert arrivals == [0, 0, 0, 5, 5, 5, 10]
    assert outcome.seconds == 15


def test_a_full_engine_rejects_requests_as_the_real_one_does():
    outcome = simulate([engine(max_num_seqs=1, max_queue_size=1)], [job(i, 1, 3, 0.0) for i in range(4)])
    assert [request.error is None for request in outcome.requests] == [True, True, False, False]
    assert "max_queue_size=1" in str(outcome.requests[2].error)
    report = summarise(outcome, SLO())
    assert (report.requests, report.refused, report.tokens) == (4, 2, 6)


def test_a_tight_pool_preempts_and_still_finishes_all():
    config = PROFILE.config({"num_gpu_blocks_override": 64, "max_num_seqs": 8, "enable_prefix_caching": False})
    replica = SimulatedEngine.of(config, PROFILE)
    outcome = simulate([replica], [job(i, 100, 300) for i in range(8)])
    report = summarise(outcome, SLO())
    assert report.tokens == 8 * 300
    assert report.preemptions > 0
    assert 0.9 < report.kv_use_max <= 1.0


def test_shared_prefixes_are_hits():
    jobs = [job(i, 1024, 2, hash_ids=(7, 100 + i)) for i in range(4)]
    replica = SimulatedEngine.of(PROFILE.config({"max_model_len": 2048, "num_gpu_blocks_override": 512}), PROFILE)
    report = summarise(simulate([replica], jobs, users=1), SLO())
    assert report.prefix_hits == pytest.approx(3 / 8)  # half of three of four prompts


def test_the_latency_target_sees_virtual_time():
    """A long prompt beside running streams: gaps stay within the target, but not without one."""
    jobs = [*(job(i, 16, 300, 0.0) for i in range(4)), job(9, 900, 4, 1.0)]
    worst = []
    for options in ({}, {"itl_target_ms": 25}):
        config = PROFILE.config({"max_num_batched_tokens": 512, **options})
        outcome = simulate([SimulatedEngine.of(config, PROFILE)], jobs)
        worst.append(max(outcome.gaps))
    assert worst[0] > 0.05
    assert worst[1] <= 0.026, "a millisecond of it is spent on the host"


def test_the_report_counts_what_met_the_slo():
    outcome = simulate([engine(max_num_seqs=1)], [job(i, 1, 3, 0.0) for i in range(4)])
    slo = SLO(ttft=5.0, tpot=1.0)
    report = summarise(outcome, slo)
    assert report.attainment == 0.5, "first tokens after 1, 4, 7 and 10 seconds"
    assert report.goodput == pytest.approx(2 / 12)
    assert (report.ttft.p50, report.itl.p99, report.tokens_per_second) == (5.5, 1.0, 1.0)
    assert (report.busy, report.sequences_per_step) == (1.0, 1.0)
    assert "50.0% within 5 s to the first token and 1000 ms per further one" in table(report, slo)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype='bfloat16', but profile 'made-up' was measured with 'float32'"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the 2048 of profile 'made-up'"),
        ({"swap_space": 1}, "profile 'made-up' was measured without swapping"),
    ],
)
def test_options_without_valid_costs_are_rejected(values, message):
    with pytest.raises(ConfigError, match=message):
        PROFILE.config(values)
    assert PROFILE.config({"dtype": "auto"}).max_num_seqs == 8


def test_swapping_blocks_takes_time():
    slow = msgspec.structs.replace(PROFILE, swap_seconds_per_block=0.1)
    seconds = []
    for mode in ("recompute", "swap"):
        config = slow.config({"num_gpu_blocks_override": 64, "swap_space": 1, "preemption_mode": mode})
        outcome = simulate([SimulatedEngine.of(config, slow)], [job(i, 100, 300) for i in range(8)])
        assert summarise(outcome, SLO()).preemptions > 0
        seconds.append(outcome.seconds)
    assert seconds[1] > seconds[0] + 1.0
