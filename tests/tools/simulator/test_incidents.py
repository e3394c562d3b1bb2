"""Replicas die and are restarted in the middle of a load: every request still gets each token once."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import PROFILE, engine, job, simulate

from inflight.config import ConfigError
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.incidents import Incidents, Kill, Rollout, parse_kill
from inflight_tools.simulator.report import summarise, table
from inflight_tools.simulator.router import ROUTERS, LeastLoaded, RoundRobin
from inflight_tools.simulator.simulation import Simulation
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.slo import SLO

caching = partial(engine, enable_prefix_caching=True)


def test_a_killed_replica_loses_the_step_that_it_runs_and_its_requests_go_on_elsewhere():
    """One token a second.  Replica 0 dies at 4.5: its request has four tokens, and gets the fifth a step later."""
    incidents = Incidents((Kill(4.5),), startup=100.0)
    outcome = simulate([engine(), engine()], [job(0, 8, 10, 0.0), job(1, 8, 10, 0.0)], incidents=incidents)
    moved, stayed = outcome.requests
    assert (moved.replica, moved.resumed, moved.tokens) == (1, 1, 10)
    # Replica 1 has begun a step at 4, and reads its result at 5: tokens 5 to 10 come at 6 to 11.
    assert (moved.first, moved.last) == (1.0, 11.0)
    assert (stayed.resumed, stayed.last) == (0, 10.0)
    assert moved.recomputed == 8 + 3, "prompt and output, without the last token: its KV was not computed yet"
    assert max(outcome.gaps) == 2.0
    assert outcome.windows == [(4.5, math.inf)]
    (retired,) = outcome.retired
    assert retired.steps == 5, "the fifth step ran, but its token was not sent"


def test_what_the_next_replica_has_cached_is_not_computed_again():
    jobs = [job(i, 520, output, 10.0 * i, hash_ids=(7,)) for i, output in enumerate((2, 50, 3))]
    outcome = simulate([caching(), caching()], jobs, incidents=Incidents((Kill(30.5, 1),)), successor=caching)
    moved = outcome.requests[1]
    assert (moved.resumed, moved.cached) == (1, 512)
    assert 0 < moved.recomputed < 60


def test_a_replica_comes_back_with_an_empty_cache():
    jobs = [job(i, 520, 2, due, hash_ids=(7,)) for i, due in enumerate((0.0, 10.0, 30.0, 40.0))]
    outcome = simulate([caching()], jobs, incidents=Incidents((Kill(20.0),), startup=5.0), successor=caching)
    assert [request.cached for request in outcome.requests] == [0, 512, 0, 512]
    assert outcome.windows == [(20.0, 25.0)]


def test_requests_wait_for_a_replica_if_none_is_ready():
    jobs = [job(0, 1, 10, 0.0), job(1, 1, 2, 5.0)]
    outcome = simulate([engine()], jobs, incidents=Incidents((Kill(3.0),), startup=20.0))
    first, second = outcome.requests
    assert (first.first, first.last, first.tokens) == (1.0, 30.0, 10), "three tokens before, seven from 23 on"
    assert (second.first, second.last) == (24.0, 25.0)


def test_a_killed_replica_that_is_down_stays_down():
    incidents = Incidents((Kill(3.0), Kill(4.0)), startup=20.0)
    assert simulate([engine()], [job(0, 1, 10, 0.0)], incidents=incidents).requests[0].resumed == 1


def test_a_rollout_drains_and_restarts_one_replica_after_another():
    """Requests of 3 s, one a second: a drained replica finishes its requests, so nothing is computed twice."""
    incidents = Incidents(rollout=Rollout(5.0, grace=30.0), startup=4.0)
    jobs = [job(i, 4, 3, float(i)) for i in range(40)]
    outcome = simulate([engine() for _ in range(3)], jobs, LeastLoaded(), incidents=incidents)
    assert len(outcome.retired) == 3
    assert sum(request.resumed for request in outcome.requests) == 0
    ((start, end),) = outcome.windows
    assert start == 5.0 and 3 * 4.0 <= end - start <= 3 * (4.0 + 3.0)


def test_what_exceeds_the_grace_goes_on_elsewhere():
    incidents = Incidents(rollout=Rollout(5.0, grace=2.0), startup=4.0)
    outcome = simulate([engine() for _ in range(3)], [job(i, 4, 100, 0.0) for i in range(3)], incidents=incidents)
    assert len(outcome.retired) == 3
    assert all(request.tokens == 100 for request in outcome.requests)
    assert sum(request.resumed for request in outcome.requests) >= 3
    assert outcome.windows == [(5.0, 5.0 + 3 * (2.0 + 4.0))]


def test_a_rollout_takes_out_no_more_than_it_may():
    class Watching(RoundRobin):
        fewest = 10

        def choose(self, prompt, fleet):
            self.fewest = min(self.fewest, len(fleet.ready))
            return super().choose(prompt, fleet)

    jobs = [job(i, 4, 5, 0.25 * i) for i in range(400)]
    for max_unavailable, kills, fewest in ((1, (), 5), (3, (), 3), (2, (Kill(4.0, 5),), 4)):
        router = Watching()
        incidents = Incidents(kills, Rollout(5.0, max_unavailable, grace=10.0), startup=6.0)
        outcome = simulate([engine() for _ in range(6)], jobs, router, incidents=incidents)
        assert router.fewest == fewest
        assert len(outcome.retired) == 6, "a replica that died before its turn is new already"


def test_a_resumed_request_is_not_refused_for_a_full_queue():
    """A replica takes two requests.  Four are there when one of two replicas dies; all of them end."""
    small = partial(engine, max_num_seqs=1, max_queue_size=1)
    incidents = Incidents((Kill(1.5),), startup=1000.0)
    outcome = simulate([small(), small()], [job(i, 1, 5, 0.0) for i in range(4)], incidents=incidents, successor=small)
    assert [request.tokens for request in outcome.requests] == [5] * 4
    assert [request.error for request in outcome.requests] == [None] * 4


@given(data=st.data())
def test_under_any_schedule_of_failures_every_request_gets_each_token_once(data):
    """The simulation itself counts: it raises if a request ends with more or fewer tokens than were asked for."""
    count = data.draw(st.integers(1, 4))
    at = st.integers(0, 120).map(lambda quarter: quarter / 4)
    kills = data.draw(st.lists(st.builds(Kill, at, st.integers(0, count - 1)), max_size=6))
    rollouts = st.builds(Rollout, at, st.integers(1, count + 1), st.sampled_from([0.0, 1.0, 3.25, 20.0]))
    incidents = Incidents(
        tuple(kills), data.draw(st.none() | rollouts), data.draw(st.sampled_from([0.0, 0.5, 4.0, 30.0]))
    )
    options = {
        "max_num_seqs": data.draw(st.sampled_from([1, 2, 8])),
        "max_num_batched_tokens": data.draw(st.sampled_from([16, 64])),
        "enable_prefix_caching": data.draw(st.booleans()),
        "async_scheduling": data.draw(st.booleans()),
    }
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12))
    closed = data.draw(st.booleans())
    times = [None] * len(lengths) if closed else sorted(data.draw(at) for _ in lengths)
    jobs = [
        job(i, prompt, output, times[i], hash_ids=(i % 2,) if i % 3 else ())
        for i, (prompt, output) in enumerate(lengths)
    ]
    make = partial(engine, **options)
    router = ROUTERS[data.draw(st.sampled_from(sorted(ROUTERS)))]()
    outcome = simulate(
        [make() for _ in range(count)], jobs, router, data.draw(st.integers(1, 5)), incidents, make,
        data.draw(st.sampled_from([0.0, 2.0])),
    )  # fmt: skip
    assert [request.tokens for request in outcome.requests] == [output for _, output in lengths]
    assert len(outcome.gaps) == len(outcome.disturbed) == sum(output - 1 for _, output in lengths)
    assert all(request.recomputed == 0 or request.resumed for request in outcome.requests)
    starts = [start for start, _ in outcome.windows]
    assert starts == sorted(starts) and all(start <= end for start, end in outcome.windows)


def test_a_lost_token_is_an_error(monkeypatch):
    send = SimulatedEngine.send
    monkeypatch.setattr(SimulatedEngine, "send", lambda self, *args: send(self, *args[:4]))
    with pytest.raises(RuntimeError, match="request 0 got 14 of its 10 tokens"):
        simulate([engine(), engine()], [job(0, 8, 10, 0.0)], incidents=Incidents((Kill(4.5),)))


def test_the_report_tells_what_users_saw_during_the_incident():
    incidents = Incidents((Kill(10.5),), startup=5.0)
    jobs = [job(i, 4, 3, 2.0 * i) for i in range(20)]
    outcome = simulate([engine(), engine()], jobs, incidents=incidents)
    report = summarise(outcome, SLO(1.0, 1.0))
    incident = report.incident
    assert incident is not None
    assert (incident.seconds, incident.resumed) == (5.0, 1)
    assert incident.during.requests + incident.outside.requests == 20
    assert incident.outside.itl.p99 == 1.0 < incident.during.itl.p99
    assert incident.outside.attainment == 1.0 > incident.during.attainment
    assert "requests resumed elsewhere: 1," in table(report, SLO())
    assert summarise(simulate([engine()], jobs), SLO()).incident is None


def test_what_no_fleet_lives_through_is_rejected():
    for incidents, message in (
        (Incidents((Kill(1.0, 3),)), "there is no replica 3 among 3"),
        (Incidents((Kill(-1.0),)), "seconds, 0 or more"),
        (Incidents(rollout=Rollout(1.0, 0)), "--max-unavailable must be at least 1"),
        (Incidents(tuple(Kill(1.0, i) for i in range(3)), startup=math.inf), "no replica would be left"),
        (Incidents(rollout=Rollout(1.0), startup=math.inf), "no replica would be left"),
    ):
        with pytest.raises(ConfigError, match=message):
            incidents.check(3)
    assert (parse_kill("30"), parse_kill("1.5:2")) == (Kill(30.0), Kill(1.5, 2))
    for text in ("", "x", "1:", "-1", "1:-2", "nan"):
        with pytest.raises(ConfigError, match="expected SECONDS or SECONDS:REPLICA"):
            parse_kill(text)


def test_incidents_without_a_maker_of_engines_are_a_mistake():
    incidents, prompts = Incidents((Kill(2.0),), startup=1.0), IdPrompts(100, 1)
    simulation = Simulation([engine()], RoundRobin(), iter([job(0, 1, 9, 0.0)]), prompts, incidents=incidents)
    with pytest.raises(AssertionError, match="incidents need a maker of engines"):
        simulation.run()


def test_resuming_costs_what_the_profile_says():
    """A prompt of 1000 tokens that is computed again: 0.11 s and a bit, instead of a step of 10 ms."""
    make = partial(SimulatedEngine.of, PROFILE.config({"max_num_batched_tokens": 2048}), PROFILE)
    jobs = [job(0, 1000, 200, 0.0), job(1, 10, 200, 0.0)]
    outcome = simulate([make(), make()], jobs, incidents=Incidents((Kill(1.0),)), successor=make)
    assert 0.11 < max(outcome.gaps) < 0.2
    assert outcome.requests[0].recomputed > 1000
