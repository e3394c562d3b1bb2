"""Replicas that compute only prompts: the gateway's policy and the engines' tiers, on the virtual clock."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import job, simulate
from simulated_handover import LARGE, MIB, hand_over

from inflight.engine.policies.cost_model import StepCost
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.incidents import Incidents, Kill, Rollout
from inflight_tools.simulator.kv_tier import TierSpec
from inflight_tools.simulator.peer_link import Link, LinkSpec
from inflight_tools.simulator.report import summarise, table
from inflight_tools.workload.slo import SLO

TOKENS = 1024 + 8  # of a long prompt: four extents, and computing them takes 0.12 s
FAST = LinkSpec(1e12, 0.0)


def longs(count: int, every: float = 1.0, output: int = 4, start: float = 0.0):
    """Long prompts that have nothing in common."""
    return [job(index, TOKENS, output, start + every * index) for index in range(count)]


def test_a_prompt_is_computed_on_one_replica_and_its_answer_continues_on_another():
    outcome = hand_over(longs(3))
    alone = simulate([SimulatedEngine.of(LARGE.config({"max_model_len": 2048}), LARGE)], longs(3))
    assert outcome.handovers.outcomes == {"handed_over": 3}
    decode, prefill = outcome.replicas
    assert {request.replica for request in outcome.requests} == {0}
    for request, same in zip(outcome.requests, alone.requests):
        assert request.ttft == pytest.approx(same.ttft, rel=1e-3)
        assert (request.tokens, request.cached, request.resumed) == (4, TOKENS - 8, 0)
    assert outcome.handovers.bytes_sent == 3 * 4 * MIB
    assert decode.kv_tiers.tiers.num_hits == 3 * (TOKENS - 8)
    assert prefill.scheduler.num_preempted_total == 0 and prefill.busy > 3 * decode.busy
    assert len(outcome.handovers.gaps) == 3 and max(outcome.handovers.gaps) < 0.06


def test_what_no_replica_for_prompts_gets():
    """Short prompts, answers of one token, and any prompt if it is off."""
    jobs = [job(0, 256, 4, 0.0), job(1, TOKENS, 1, 1.0), job(2, TOKENS, 2, 2.0)]
    assert hand_over(jobs).handovers.outcomes == {"handed_over": 1}
    off = hand_over(jobs, handover="off")
    assert off.handovers.outcomes == {} and off.replicas[1].steps == 0
    same = [job(0, TOKENS, 4, 0.0, hash_ids=(0, 1)), job(1, TOKENS, 4, 2.0, hash_ids=(0, 1))]
    assert hand_over(same).handovers.outcomes == {"handed_over": 1}  # the gateway has sent this prefix before


@pytest.mark.parametrize("link", [LinkSpec(1e3, 1e-4), LinkSpec(1e12, 1.5)], ids=["no rate", "late"])
def test_over_a_link_without_end_everything_is_computed_in_time(link):
    """The wait for KV is over when computing it would have ended."""
    outcome = hand_over(longs(4, every=20.0), link=link)
    assert outcome.handovers.outcomes == {"handed_over": 4} and outcome.handovers.bytes_sent == 0
    assert [request.cached for request in outcome.requests] == [0] * 4
    compute = outcome.requests[0].ttft
    first, *others = (gap - link.latency for gap in outcome.handovers.gaps)
    assert first < 0.001 * TOKENS + 1.1 * compute  # a millisecond for each token, until it has been measured
    assert all(gap < 2.1 * compute for gap in others)


def test_auto_learns_that_a_link_is_slow():
    """The gateway's rule: seconds until the rest began, against seconds to compute the prompt."""
    slow, fast = (
        hand_over(longs(30, every=0.5), link=link, handover="auto")
        for link in (LinkSpec(3e6, 1e-3), LinkSpec(1e9, 1e-4))
    )
    assert fast.handovers.outcomes == {"handed_over": 30}
    assert 1 <= slow.handovers.outcomes["handed_over"] < 20
    assert slow.replicas[0].busy > 2 * fast.replicas[0].busy


def test_long_prompts_disturb_no_stream_on_other_replicas():
    """Chunks of 512 tokens take 60 ms each."""
    streams = [job(index, 8, 400, 0.0) for index in range(4)]
    jobs = [*streams, *(job(4 + index, 1800, 2, 0.2 + 0.4 * index) for index in range(10))]
    config = LARGE.config({"max_model_len": 2048, "max_num_batched_tokens": 512})
    both = simulate([SimulatedEngine.of(config, LARGE) for _ in range(2)], jobs)
    apart = hand_over(jobs, link=FAST, max_num_batched_tokens=512)
    gaps = [max(request.longest_gap for request in outcome.requests[:4]) for outcome in (both, apart)]
    assert gaps[0] > 0.055 and gaps[1] < 0.03
    assert summarise(apart, SLO()).itl.p99 < 0.5 * summarise(both, SLO()).itl.p99


def test_replicas_that_read_the_same_one_share_its_network():
    """Each reads four extents, two at a time, in turn: the one that begins has its own once six have been sent."""
    link = LinkSpec(2e7, 1e-4)
    costly = msgspec.structs.replace(LARGE, device=StepCost(tokens=(1, 1001), seconds_at=(0.01, 2.0)))
    jobs = [job(index, TOKENS, 3, 0.0) for index in range(2)]
    one, two = (
        hand_over(jobs, prefills, 2, link=link, max_num_batched_tokens=4096, profile=costly) for prefills in (1, 2)
    )
    for outcome in (one, two):
        assert [request.cached for request in outcome.requests] == [TOKENS - 8] * 2
    extent, begins = MIB / 2e7, max(two.handovers.gaps) - 4 * MIB / 2e7  # seconds
    assert 0 < begins < extent
    assert sorted(one.handovers.gaps) == pytest.approx([6 * extent + begins, 8 * extent + begins], rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=30))
def test_a_link_moves_one_extent_at_a_time_and_rests_for_none_that_it_could_move(asked):
    link, busy, unit = Link(), set(), 1 / 64  # seconds
    for start, count in asked:
        begin = next(at for at in range(start, 400) if busy.isdisjoint(range(at, at + count)))
        assert link.free_from(unit * start, unit * count) == unit * begin
        link.take(unit * begin, unit * count)
        busy.update(range(begin, begin + count))
    assert link.seconds == unit * len(busy)


def test_a_replica_for_prompts_that_dies_costs_no_request():
    """One dies while it computes, one while it is read, over a link that takes 0.2 s."""
    for at, outcomes in ((0.05, {"failed": 1}), (0.20, {"handed_over": 1})):
        incidents = Incidents((Kill(at, 1),), startup=100.0)
        outcome = hand_over([job(0, TOKENS, 6, 0.0)], link=LinkSpec(2e7, 1e-4), incidents=incidents)
        assert outcome.handovers.outcomes == outcomes
        [request] = outcome.requests
        assert (request.tokens, request.replica) == (6, 0) and request.cached < TOKENS - 8
        assert request.last < 0.6


def test_a_replica_that_starts_again_gets_prompts_again_and_is_read_again():
    """After three failures the engine that reads leaves a tier alone for 30 s; until then it computes."""
    incidents = Incidents((Kill(5.0, 1),), startup=14.0)
    outcome = hand_over(longs(15, every=4.0), incidents=incidents)
    assert outcome.handovers.outcomes == {"handed_over": 12, "busy": 3}
    assert [request.cached > 0 for request in outcome.requests] == [True] * 2 + [False] * 10 + [True] * 3
    assert len(outcome.retired) == 1 and not outcome.retired[0].kv_tiers.is_open


def test_a_request_whose_own_replica_dies_asks_for_its_kv_again():
    outcome = hand_over([job(0, TOKENS, 200, 0.0)], 1, 2, incidents=Incidents((Kill(0.5, 0),), startup=100.0))
    [request] = outcome.requests
    assert (request.replica, request.resumed, request.cached) == (1, 1, TOKENS - 8)


def test_a_slow_replica_for_prompts_gets_none_for_a_while():
    """Sixty prompts at once take longer than the ten seconds that the gateway waits for one."""
    prompts = [job(index, 1800, 2, 0.0) for index in range(60)]
    outcome = hand_over(prompts, max_num_batched_tokens=512, max_num_seqs=2)
    found = outcome.handovers.outcomes
    assert found["late"] > 0 and sum(found.values()) == 60
    refusing = hand_over(prompts, 1, 4, max_queue_size=2).handovers.outcomes
    assert refusing["refused"] == 1 and refusing["busy"] > 0


def test_on_a_gpu_no_step_is_longer_for_what_is_copied():
    options = {**LARGE.options, "device": "cuda"}
    outcome = hand_over(longs(3), profile=msgspec.structs.replace(LARGE, options=options))
    for engine in outcome.replicas:
        assert not engine.kv_tiers.tiers.on_cores and engine.kv_tiers.cpu_seconds() == 0.0
    assert [request.cached for request in outcome.requests[1:]] == [TOKENS - 8] * 2  # the first is not measured yet


def test_the_report_names_both_kinds_of_replicas():
    report = summarise(hand_over(longs(5)), SLO())
    assert [(tier.type, tier.loaded) for tier in report.kv_tiers] == [("peer", 20), ("host", 0)]
    assert report.kv_tiers[1].stored >= 20 and report.replicas == 2
    assert report.handover.prefill_busy > report.handover.decode_busy > 0
    assert "KV tier       peer: 20 extents loaded" in table(report, SLO())


def test_the_longest_gap_is_a_part_of_the_slo():
    outcome = hand_over(longs(5))
    longest = max(request.longest_gap for request in outcome.requests)
    assert summarise(outcome, SLO(itl=longest)).attainment == 1.0 > summarise(outcome, SLO(itl=longest / 2)).attainment


def test_eight_hours_of_handovers_lose_no_block():
    """A prompt every 90 s; the replica for prompts dies every hour, one that generates every two."""
    kills = tuple(Kill(3600.0 * hour + 1.05, 2 if hour % 2 else hour % 4 // 2) for hour in range(1, 8))
    incidents = Incidents(kills, startup=30.0)
    jobs = [job(index, 700 + 97 * (index % 13), 3 + index % 5, 90.0 * index) for index in range(320)]
    host = TierSpec("host", 16 * MIB, 5e9, 1e-5)
    outcome = hand_over(jobs, 1, 2, incidents=incidents, host=host, handover="auto", num_gpu_blocks_override=200)
    assert outcome.requests[-1].last > 7.9 * 3600
    assert outcome.handovers.outcomes["handed_over"] > 280
    assert outcome.replicas[2].kv_tiers.host.num_bytes <= host.size


@given(data=st.data())
def test_whatever_happens_every_request_gets_each_token_once_and_no_block_is_lost(data):
    """`Simulation.run` checks the tokens, `hand_over` the blocks."""
    prefills, decodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    at = st.integers(0, 120).map(lambda part: part / 40)
    kills = data.draw(st.lists(st.builds(Kill, at, st.integers(0, prefills + decodes - 1)), max_size=4))
    rollouts = st.builds(Rollout, at, st.integers(1, 3), st.sampled_from([0.0, 0.5, 20.0]))
    incidents = Incidents(tuple(kills), data.draw(st.none() | rollouts), data.draw(st.sampled_from([0.0, 0.5, 4.0])))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 1400), st.integers(1, 12)), min_size=1, max_size=10))
    closed = data.draw(st.booleans())
    times = [None] * len(lengths) if closed else sorted(data.draw(at) for _ in lengths)
    jobs = [
        job(index, prompt, output, times[index], hash_ids=(index % 2, 2) if index % 3 else ())
        for index, (prompt, output) in enumerate(lengths)
    ]
    outcome = hand_over(
        jobs, prefills, decodes,
        LinkSpec(data.draw(st.floats(1e5, 1e12)), data.draw(st.sampled_from([0.0, 1e-4, 0.01, 1.0]))),
        data.draw(st.sampled_from(["auto", "0", "100", "1000"])),
        incidents,
        TierSpec("host", data.draw(st.sampled_from([1, 3, 64])) * MIB, data.draw(st.floats(1e7, 1e10)), 1e-5),
        num_gpu_blocks_override=data.draw(st.integers(96, 300)),
        max_num_seqs=data.draw(st.sampled_from([1, 3, 8])),
        async_scheduling=data.draw(st.booleans()),
        max_queue_size=data.draw(st.sampled_from([2, 1000])),
    )  # fmt: skip
    taken = [request for request in outcome.requests if request.error is None]
    assert all(request.tokens == request.job.output_tokens and request.ended for request in taken)
    assert len(outcome.gaps) == sum(request.tokens - 1 for request in taken)
    assert all(gap >= 0 for gap in outcome.gaps) and outcome.handovers.busiest <= 1.0 < math.inf
