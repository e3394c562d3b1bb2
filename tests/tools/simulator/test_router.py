"""Routers: where requests go, and what that gains."""

from __future__ import annotations

import pytest
from simulated import PROFILE, engine, job, simulate

from inflight.config import ConfigError
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.fleet import Fleet, Gauges
from inflight_tools.simulator.report import summarise
from inflight_tools.simulator.router import LeastLoaded, LeastWaiting, PrefixAffinity, RoundRobin, make_router
from inflight_tools.workload.slo import SLO


def where(router, jobs, count=3, **options):
    return [request.replica for request in simulate([engine() for _ in range(count)], jobs, router, **options).requests]


def test_round_robin_takes_turns():
    assert where(RoundRobin(), [job(i, 1, 5, 0.0) for i in range(7)]) == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_avoids_busy_replicas():
    jobs = [job(0, 1, 50, 0.0), job(1, 1, 2, 0.0), job(2, 1, 50, 0.0), job(3, 1, 5, 10.0), job(4, 1, 5, 10.0)]
    assert where(LeastLoaded(), jobs) == [0, 1, 2, 1, 0]


def test_routers_pass_over_replicas_that_are_not_ready():
    fleet = Fleet([engine() for _ in range(3)])
    fleet.drain(fleet.replicas[0])
    prompt = list(range(16))
    assert [RoundRobin().choose(prompt, fleet), LeastLoaded().choose(prompt, fleet)] == [1, 1]
    assert {LeastWaiting(seed).choose(prompt, fleet) for seed in range(20)} == {1, 2}
    turns = RoundRobin()
    assert [turns.choose(prompt, fleet) for _ in range(4)] == [1, 2, 1, 2]
    assert {PrefixAffinity().choose([token] * 16, fleet) for token in range(40)} == {1, 2}


def test_least_waiting_reads_the_gauges():
    fleet = Fleet([engine() for _ in range(4)])
    fleet.scraped = [Gauges(2, 0, 0), Gauges(0, 9, 0), Gauges(0, 3, 0), Gauges(0, 3, 0)]
    assert {LeastWaiting(seed).choose([1], fleet) for seed in range(20)} == {2, 3}


def test_between_two_scrapes_least_waiting_sees_old_gauges():
    """A replica has had a request since 0; requests between the scrapes at 40 and 80 all go to the other one."""
    jobs = [job(0, 1, 200, 0.0), *(job(i, 1, 100, 40.5 + 3 * i) for i in range(1, 6))]
    current = where(LeastWaiting(), jobs, count=2)
    assert sorted(current.count(replica) for replica in (0, 1)) == [3, 3]
    first, *others = where(LeastWaiting(), jobs, count=2, scrape_interval=40.0)
    assert set(others) == {1 - first}


def test_prefix_affinity_sends_equal_prefixes_to_one_replica_until_it_is_full():
    spread = [job(i, 600, 2, float(20 * i), hash_ids=(i % 2, 50 + i)) for i in range(6)]
    homes = where(PrefixAffinity(), spread)
    assert homes == homes[:2] * 3
    burst = [job(i, 600, 50, 0.0, hash_ids=(1, 50 + i)) for i in range(24)]
    crowded = where(PrefixAffinity(), burst)
    assert len(set(crowded[:8])) == 1, "eight requests are never too many"
    assert set(crowded) == {0, 1, 2}
    assert max(crowded.count(replica) for replica in range(3)) == 10, "1.25 times the mean"


def test_a_prompt_without_a_full_block_goes_where_least_is_to_do():
    assert where(PrefixAffinity(), [job(i, 15, 50, 0.0) for i in range(6)]) == [0, 1, 2, 0, 1, 2]


def test_affinity_pays_off_if_prefixes_are_shared():
    jobs = [job(i, 1024, 20, 0.05 * i, hash_ids=(i % 8, 100 + i)) for i in range(64)]
    hits = {}
    for router in (RoundRobin(), PrefixAffinity()):
        replicas = [SimulatedEngine.of(PROFILE.config({"max_model_len": 2048}), PROFILE) for _ in range(5)]
        hits[type(router)] = summarise(simulate(replicas, jobs, router), SLO()).prefix_hits
    assert hits[PrefixAffinity] > hits[RoundRobin] + 0.1


def test_hundreds_of_replicas_share_a_load():
    replicas = [SimulatedEngine.of(PROFILE.config({}), PROFILE) for _ in range(200)]
    report = summarise(simulate(replicas, [job(i, 20, 20, 0.001 * i) for i in range(1000)], LeastLoaded()), SLO())
    assert (report.tokens, report.replicas, report.refused) == (20_000, 200, 0)
    assert report.attainment == 1.0


def test_an_unknown_router_is_named():
    message = "router 'random': must be one of round-robin, least-loaded, least-waiting, prefix-affinity"
    with pytest.raises(ConfigError, match=message):
        make_router("random")
