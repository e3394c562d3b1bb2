"""Weighted fair queueing across tenants: shares, caps, no saved credit, and a tenant's effect on others."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_clock import Clocked

from inflight.engine.integrity import check_core
from inflight.engine.request import Status

NAMES = ["a", "b", "c"]


class Tenants(Clocked):
    """Counts the tokens of each tenant's requests that were scheduled."""

    def __init__(self, tenants: dict, **options) -> None:
        super().__init__(**{"tenants": tenants, "max_num_batched_tokens": 256, "max_queue_size": 0, **options})
        self.served: Counter[str] = Counter()
        self.in_line: set[str] = set()
        self._execute, self.runner.execute = self.runner.execute, self._look_and_execute

    def _look_and_execute(self, out, prepared):
        """Record the tenants in line once the step is scheduled: it has requests waiting, and its cap leaves room."""
        tenants = self.core.config.tenants
        caps = {name: tenants[name].max_running if name in tenants else None for name in NAMES}
        self.in_line = {n for n in NAMES if self.waiting_of(n) and (caps[n] is None or self.running_of(n) < caps[n])}
        return self._execute(out, prepared)

    def step(self):
        self.in_line = set()
        out = super().step()
        for request, count in zip(out.requests, out.num_scheduled_tokens):
            self.served[request.tenant] += count
        return out

    def running_of(self, name: str) -> int:
        return sum(request.tenant == name for request in self.scheduler.running)

    def live_of(self, name: str) -> int:
        return sum(r.tenant == name and r.status is not Status.FINISHED for r in self.sequences.values())

    def waiting_of(self, name: str) -> int:
        return sum(request.tenant == name for request in self.waiting)


def keep_busy(rig: Tenants, name: str, prompt: int, output: int, **fields) -> None:
    while rig.waiting_of(name) < 4:
        rig.add(prompt, output, tenant=name, **fields)


def test_tokens_are_shared_by_weight_for_requests_of_any_shape():
    rig = Tenants({"gold": {"weight": 3}, "free": {"weight": 1}}, max_num_seqs=8)
    for _ in range(1200):
        keep_busy(rig, "gold", 30, 4)
        keep_busy(rig, "free", 2, 20)
        rig.step()
    assert 2.8 < rig.served["gold"] / rig.served["free"] < 3.2


def test_unused_max_tokens_cost_a_tenant_nothing():
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=8)
    for _ in range(1200):
        keep_busy(rig, "declares", 4, 59, stop=True)  # ends at its first token
        keep_busy(rig, "exact", 4, 10)
        rig.step()
    assert 0.85 < rig.served["declares"] / rig.served["exact"] < 1.15


def test_an_idle_tenant_saves_up_no_credit():
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=4)
    for _ in range(400):
        keep_busy(rig, "steady", 4, 8)
        rig.step()
    before = rig.served["steady"]
    for _ in range(100):
        keep_busy(rig, "steady", 4, 8)
        keep_busy(rig, "idled", 4, 8)
        rig.step()
    assert 0.7 < (rig.served["steady"] - before) / rig.served["idled"] < 1.4


def test_a_tenant_served_alone_runs_up_no_debt():
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=4)
    for _ in range(400):
        keep_busy(rig, "early", 4, 8)
        rig.step()
    rig.run()
    rig.served.clear()
    for _ in range(100):
        keep_busy(rig, "early", 4, 8)
        keep_busy(rig, "late", 4, 8)
        rig.step()
    assert 0.7 < rig.served["early"] / rig.served["late"] < 1.4


@st.composite
def loads(draw):
    """Bursts of requests of up to three tenants, so that they join and leave the line at random."""
    options = st.fixed_dictionaries(
        {"weight": st.sampled_from([0.5, 1, 2, 4])},
        optional={"max_running": st.integers(1, 3), "max_queued": st.integers(4, 40)},
    )
    burst = st.tuples(
        st.integers(0, 25),  # steps before it
        st.sampled_from(NAMES),
        st.integers(1, 30),  # requests
        st.integers(1, 12),  # tokens of the prompt
        st.integers(1, 12),  # max_tokens
        st.booleans(),  # ends at its first token
        st.integers(1, 2),  # n
        st.integers(0, 2),  # class
    )
    return {
        "tenants": {name: draw(options) for name in NAMES},
        "bursts": draw(st.lists(burst, min_size=2, max_size=10)),
        "max_num_seqs": draw(st.integers(1, 4)),
        "num_blocks": draw(st.sampled_from([16, 24, 64])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority", "sjf"])),
        "enable_prefix_caching": draw(st.booleans()),
    }


@given(loads())
def test_shares_differ_by_no_more_than_the_bound_and_caps_hold(load):
    tenants = load["tenants"]
    rig = Tenants(**{key: value for key, value in load.items() if key != "bursts"})
    queue, slots = rig.scheduler.waiting, load["max_num_seqs"]
    weight = {name: options["weight"] for name, options in tenants.items()}
    since: dict[tuple[str, str], Counter[str]] = {}  # pairs in line -> tokens served when both joined
    longest = 0

    def checked_step() -> None:
        out = rig.step()
        for name, options in tenants.items():
            assert sum(r.tenant == name for r in out.requests) <= options.get("max_running", slots)
        in_line = rig.in_line - {request.tenant for request in out.preempted}
        for one, two in permutations(NAMES, 2):
            if not {one, two} <= in_line:
                since.pop((one, two), None)
                continue
            start = since.setdefault((one, two), rig.served.copy())
            share = {name: (rig.served[name] - start[name]) / weight[name] for name in (one, two)}
            bound = longest * ((1 + 2 * slots) / weight[one] + (1 + slots) / weight[two])
            assert share[one] - share[two] <= bound, f"{share} after {rig.now} steps"

    for gap, name, count, prompt, output, stop, n, priority in load["bursts"]:
        for _ in range(gap):
            checked_step()
        for _ in range(count):
            waiting = rig.live_of(name) - rig.running_of(name)
            most = tenants[name].get("max_running", slots)
            room = min(slots - len(rig.scheduler.running), most - rig.running_of(name))
            failure = rig.try_add(prompt, output, tenant=name, stop=stop, n=n, priority=priority)
            max_queued = tenants[name].get("max_queued")
            if failure is None:
                longest = max(longest, prompt + output)
                assert max_queued is None or waiting + n - room <= max_queued
            elif failure.code == "INVALID_ARG":
                assert n > max_queued + min(slots, most)
            else:
                assert waiting + n - room > max_queued
                assert f"tenant '{name}' is full: {waiting - room} sequences" in failure.message
    for _ in range(4000):
        if not rig.core.has_work:
            break
        checked_step()
    assert rig.all_finished
    assert len(queue) == 0
    check_core(rig.core)


def test_a_tenant_at_its_cap_leaves_its_place_to_others():
    rig = Tenants({"capped": {"max_running": 2}}, max_num_seqs=6)
    for _ in range(10):
        rig.add(2, 10, tenant="capped")
    for _ in range(10):
        rig.add(2, 10, tenant="other")
    rig.step()
    assert (rig.running_of("capped"), rig.running_of("other")) == (2, 4)
    rig.run()
    assert rig.all_finished


def test_star_stands_for_every_tenant_that_is_not_named():
    rig = Tenants({"named": {"max_queued": 3}, "*": {"max_queued": 1, "per_name": True}}, max_num_seqs=1)
    rig.add(2, 9, tenant="named")
    rig.step()
    for _ in range(3):
        rig.add(2, 2, tenant="named")
    assert "tenant 'named' is full" in rig.try_add(2, 2, tenant="named").message
    for name in ("x", "y", ""):
        rig.add(2, 2, tenant=name)
        refused = rig.try_add(2, 2, tenant=name)
        assert refused.code == "UNAVAILABLE"
        assert f"tenant {name!r} is full: 1 sequences" in refused.message
        assert "max_queued=1" in refused.message


def test_names_that_clients_make_up_share_the_limits_of_star():
    rig = Tenants({"*": {"max_running": 2, "max_queued": 1}}, max_num_seqs=8)
    for name in ("x", "y", "z"):
        rig.add(2, 9, tenant=name)
    rig.step()
    assert rig.running_of("x") + rig.running_of("y") + rig.running_of("z") == 2
    refused = rig.try_add(2, 9, tenant="made up")
    assert refused.code == "UNAVAILABLE"
    assert "the queue of all tenants without limits of their own is full: 1 sequences" in refused.message


@pytest.mark.parametrize(
    ("options", "own"), [({}, False), ({"tenant_header": "x-tenant"}, True), ({"star": {"per_name": True}}, True)]
)
def test_a_name_has_its_own_account_only_if_it_cannot_be_made_up_or_the_operator_says_so(options, own):
    star = options.pop("star", {})
    rig = Tenants({"*": {"max_running": 1, **star}}, max_num_seqs=8, **options)
    for name in ("x", "y", "z"):
        rig.add(2, 9, tenant=name)
    rig.step()
    assert len(rig.scheduler.running) == (3 if own else 1)


@given(
    num_names=st.integers(1, 60),
    weights=st.tuples(st.sampled_from([0.5, 1, 3]), st.sampled_from([0.5, 1, 3])),
    prompt=st.integers(1, 12),
    output=st.integers(1, 12),
)
def test_made_up_names_buy_no_share(num_names, weights, prompt, output):
    """However many names one client uses, all of them together get the share of "*" beside a named tenant."""
    gold, star = weights
    rig = Tenants({"gold": {"weight": gold}, "*": {"weight": star}}, max_num_seqs=4)
    for turn in range(400):
        while len([request for request in rig.waiting if request.tenant != "gold"]) < 6:
            rig.add(prompt, output, tenant=f"made up {(turn + len(rig.sequences)) % num_names}")
        keep_busy(rig, "gold", 6, 6)
        rig.step()
    made_up = sum(count for name, count in rig.served.items() if name != "gold")
    longest = max(prompt + output, 12)
    assert made_up / star - rig.served["gold"] / gold <= longest * ((1 + 2 * 4) / star + (1 + 4) / gold)


def test_priority_classes_count_within_a_tenant():
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=4, scheduling_policy="priority")
    for _ in range(2):
        rig.add(2, 30, tenant="a", priority=2)
        rig.add(2, 30, tenant="b", priority=2)
    rig.step()
    urgent = rig.add(2, 3, tenant="a", priority=0)
    out = rig.step()
    assert [request.tenant for request in out.preempted] == ["a"]
    assert urgent in out.requests
    rig.add(2, 3, tenant="c", priority=0)
    assert not rig.step().preempted, "tenant c has no running request"


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "edf", "priority"])
def test_within_a_tenant_the_policy_sets_the_order(policy):
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=1, scheduling_policy=policy)
    rig.add(2, 9, tenant="t", priority=-1, timeout=1)
    rig.add(2, 8, tenant="t", priority=1, timeout=30)
    rig.add(2, 6, tenant="t", priority=0, timeout=50)
    rig.add(2, 7, tenant="t", priority=2, timeout=20)
    rig.run()
    expected = {"fcfs": [0, 1, 2, 3], "sjf": [2, 3, 1, 0], "edf": [0, 3, 1, 2], "priority": [0, 2, 1, 3]}
    assert rig.order() == expected[policy]


def test_an_aborted_tenant_leaves_the_line():
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=1)
    rig.add(2, 5, tenant="a")
    rig.step()
    waiting = [rig.add(2, 5, tenant=name) for name in ("b", "c", "b")]
    for request in (waiting[0], waiting[2], rig.requests[0]):
        rig.core.abort(request.request_id)
        check_core(rig.core)
    rig.run()
    assert rig.order() == [0, 2]


def test_tenants_without_requests_are_forgotten():
    rig = Tenants({"*": {"per_name": True}}, max_num_seqs=4)
    for number in range(1100):
        rig.add(1, 1, tenant=f"client {number}")
        rig.step()
    assert len(rig.scheduler.waiting._tenants) == 1024


def test_a_charge_out_of_turn_lets_nobody_in_line_wait_for_those_that_join():
    """A light tenant's tag is far ahead of the others': a load of its, or a correction, is no service at that tag."""
    rig = Tenants({"light": {"weight": 0.01}, "*": {"per_name": True}}, max_num_seqs=1)
    light = rig.add(2, 8, tenant="light")
    rig.step()
    for _ in range(6):
        rig.add(2, 8, tenant="in line")
    rig.scheduler.waiting.charge(light, 1)
    for _ in range(2):
        rig.add(2, 8, tenant="joins")
    rig.run()
    assert rig.order()[1:5] in ([1, 7, 2, 8], [7, 1, 8, 2])
