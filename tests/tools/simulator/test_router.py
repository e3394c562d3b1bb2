"""Routers: where requests go, and what that gains."""

from __future__ import annotations

import pytest
from simulated import PROFILE, engine, job, simulate

from inflight.config import ConfigError
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.report import summarise
from inflight_tools.simulator.router import LeastLoaded, PrefixAffinity, RoundRobin, make_router
from inflight_tools.workload.slo import SLO


def where(router, jobs, count=3):
    return [request.replica for request in simulate([engine() for _ in range(count)], jobs, router).requests]


def test_round_robin_takes_turns():
    assert where(RoundRobin(), [job(i, 1, 5, 0.0) for i in range(7)]) == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_avoids_busy_replicas():
    jobs = [job(0, 1, 50, 0.0), job(1, 1, 2, 0.0), job(2, 1, 50, 0.0), job(3, 1, 5, 10.0), job(4, 1, 5, 10.0)]
    assert where(LeastLoaded(), jobs) == [0, 1, 2, 1, 0]


def test_prefix_affinity_sends_equal_prefixes_to_one_replica_until_it_is_overloaded():
    spread = [job(i, 600, 2, float(20 * i), hash_ids=(i % 2, 50 + i)) for i in range(6)]
    assert where(PrefixAffinity(), spread) == [0, 0, 0, 0, 0, 0], "both prefixes start at the first replica"
    burst = [job(i, 600, 50, 0.0, hash_ids=(1, 50 + i)) for i in range(9)]
    assert sorted(set(where(PrefixAffinity(spare=2), burst))) == [0, 1, 2]


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
    with pytest.raises(ConfigError, match="router 'random': must be one of round-robin, least-loaded, prefix-affinity"):
        make_router("random")
