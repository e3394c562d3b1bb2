"""The order of requests: priority classes with aging, shortest job, earliest deadline; and which requests give way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_clock import Clocked

from inflight.config import EngineConfig
from inflight.engine.policies.selection import make_policies
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams

AGING, PER_TOKEN, DEFAULT_TIMEOUT = 8.0, 0.5, 20.0
OPTIONS = {
    "priority_aging_seconds": AGING,
    "sjf_aging_seconds": PER_TOKEN,
    "edf_default_timeout": DEFAULT_TIMEOUT,
    "max_num_batched_tokens": 64,
}
POLICIES = ["fcfs", "priority", "sjf", "edf"]


def patience(policy: str, request: Request) -> float:
    """As docs/scheduling.md defines it."""
    if policy == "priority":
        return request.priority * AGING
    if policy == "sjf":
        return request.params.max_tokens * PER_TOKEN
    if policy == "edf":
        return DEFAULT_TIMEOUT if request.deadline is None else request.deadline - request.arrival_time
    return 0.0


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "gap": st.integers(0, 4),
            "prompt": st.integers(1, 12),
            "output": st.integers(1, 12),
            "priority": st.integers(0, 3),
            "timeout": st.one_of(st.none(), st.integers(1, 40)),
            "n": st.integers(1, 2),
        }
    ),
    min_size=3,
    max_size=20,
)


@given(st.sampled_from(POLICIES), arrivals, st.integers(1, 3), st.sampled_from([16, 20, 64]), st.sampled_from([4, 64]))
def test_a_request_is_overtaken_only_within_the_difference_of_patience(policy, load, max_num_seqs, blocks, budget):
    options = {**OPTIONS, "max_num_batched_tokens": budget, "short_prompt_share": 0}  # whose requests overtake others
    rig = Clocked(blocks, scheduling_policy=policy, max_num_seqs=max_num_seqs, **options)
    gave_way: set[tuple[tuple[int, int], tuple[int, int]]] = set()
    asked = rig.scheduler.waiting.outranked

    def outranked(request, running):
        for other in asked(request, running):
            assert policy == "priority"
            assert other.priority > request.priority, "only a strictly lower class gives way"
            assert other.arrival_time - request.arrival_time > (request.priority - other.priority) * AGING
            gave_way.add(((other.request_id, other.index), (request.request_id, request.index)))
            yield other

    rig.scheduler.waiting.outranked = outranked

    def checked_step() -> None:
        waiting = rig.waiting
        out = rig.step()
        starting = [request for request in waiting if request in out.requests]
        left_behind = [request for request in waiting if request not in out.requests]
        for sooner in starting:
            for later in left_behind:
                margin = patience(policy, later) - patience(policy, sooner)
                assert sooner.arrival_time - later.arrival_time <= margin, f"{sooner} overtook {later}"

    for item in load:
        for _ in range(item["gap"]):
            checked_step()
        n = 1 if policy == "fcfs" else item["n"]  # under fcfs siblings go first, since their prompt is computed
        rig.add(item["prompt"], item["output"], priority=item["priority"], timeout=item["timeout"], n=n)
    for _ in range(3000):
        if not rig.core.has_work:
            break
        checked_step()
    assert rig.all_finished
    assert not any((b, a) in gave_way for a, b in gave_way), "two requests preempted each other"


@pytest.mark.parametrize(
    ("policy", "victim", "flood"),
    [
        ("priority", {"priority": 2}, {"priority": 0}),
        ("sjf", {"output": 40}, {"output": 6}),
        ("edf", {}, {"timeout": 5}),
    ],
)
def test_nothing_starves_under_an_endless_flood(policy, victim, flood):
    """Requests keep arriving at 2.5 times the rate of service; one that came before them still starts in time."""
    rig = Clocked(scheduling_policy=policy, max_num_seqs=2, **OPTIONS)
    rig.add(1, 5, priority=-9, timeout=1)
    rig.add(1, 5, priority=-9, timeout=1)
    request = rig.add(4, **{"output": 5, **victim})
    while request.request_id not in rig.started:
        rig.step()
        rig.add(1, **{"output": 5, **flood})
        assert rig.now < 200
    margin = patience(policy, request) - patience(policy, rig.requests[3])
    overtook = [r for r in rig.requests.values() if r.request_id > 2 and r.request_id in rig.started]
    assert max(r.arrival_time for r in overtook) <= request.arrival_time + margin
    assert margin >= 10, "it may be overtaken for a while"
    rounds = sum(r.arrival_time < margin for r in rig.requests.values()) * 6 / 2  # the work due before it
    assert rig.started[request.request_id] <= margin + rounds
    if policy == "priority":
        while rig.first_token.get(request.request_id) is None or request.num_output_tokens < 5:
            assert request.num_preemptions == 0, "it has waited out its patience: no request preempts it"
            rig.step()
            rig.add(1, 5, priority=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tenants", [{}, {"tenants": {"a": {"weight": 2}}}])
def test_only_priorities_take_the_place_of_running_requests(policy: str, tenants: dict[str, object]) -> None:
    """Also for the prediction of how long a request waits."""
    rig = Clocked(scheduling_policy=policy, max_num_seqs=2, **tenants, **OPTIONS)
    for _ in range(2):
        rig.add(3, 40, priority=9)
    for _ in range(2):
        rig.step()
    request = rig.add(3, 2, priority=-9, timeout=1)
    outranked = list(rig.scheduler.waiting.outranked(request, rig.scheduler.running))
    assert outranked == (rig.scheduler.running[::-1] if policy == "priority" else [])


def saturated(**options) -> Clocked:
    """All slots taken by requests of class 2 that decode."""
    rig = Clocked(**{"scheduling_policy": "priority", "max_num_seqs": 4, "max_num_batched_tokens": 64, **options})
    for _ in range(30):
        rig.add(3, 40, priority=2)
    rig.step()
    rig.step()
    assert len(rig.scheduler.running) == 4
    return rig


def test_an_interactive_request_takes_a_slot_in_the_next_step():
    rig = saturated()
    latest = rig.scheduler.running[-1]
    request = rig.add(8, 3, priority=0)
    out = rig.step()
    assert request in out.requests
    assert out.preempted == [latest], "the latest arrival of the lowest class"
    assert out.samples[out.requests.index(request)], "its whole prompt is computed and its first token sampled"
    assert len(rig.scheduler.running) == 4
    rig.run()
    assert rig.all_finished
    assert rig.started[request.request_id] == 2


def test_several_interactive_requests_take_their_slots_at_once():
    rig = saturated()
    requests = [rig.add(5, 3, priority=0) for _ in range(3)]
    out = rig.step()
    assert set(requests) <= set(out.requests)
    assert len(out.preempted) == 3


def test_an_interactive_request_takes_blocks():
    rig = Clocked(40, scheduling_policy="priority")  # of 4 tokens each
    for _ in range(4):
        rig.add(28, 4, priority=2)
    rig.step()
    assert len(rig.scheduler.running) == 4
    request = rig.add(62, 1, priority=0)
    out = rig.step()
    assert len(out.preempted) == 1, "it needs 16 blocks, 12 are free, and each gives 7"
    assert request in out.requests
    assert request.request_id in rig.first_token
    rig.run()
    assert rig.all_finished


@pytest.mark.parametrize("admission", ["free_blocks", "predicted_peak"])
@pytest.mark.parametrize("tenants", [{}, {"*": {}}])
def test_no_request_is_preempted_unless_that_makes_enough_room(admission, tenants):
    rig = Clocked(22, scheduling_policy="priority", admission=admission, tenants=tenants)
    first = rig.add(40, 18, priority=0)  # 10 blocks and more, which it keeps
    rig.add(6, 12, priority=2)
    rig.step()
    assert len(rig.scheduler.running) == 2
    urgent = rig.add(52, 2, priority=0)  # 13 blocks
    for _ in range(15):
        assert not rig.step().preempted
    rig.run()
    assert rig.all_finished
    assert rig.started[urgent.request_id] > rig.first_token[first.request_id] + 15


def test_blocks_that_only_victims_share_count_once():
    """Each gives way for the blocks that both reference."""
    rig = Clocked(16, scheduling_policy="priority", enable_prefix_caching=True, admission="free_blocks")
    for _ in range(2):
        rig.add(40, 20, priority=2)  # 10 blocks, 9 of them shared
    for _ in range(2):
        rig.step()
    assert len(rig.scheduler.running) == 2
    request = rig.add(48, 2, priority=0, cache_salt="its own")
    out = rig.step()
    assert len(out.preempted) == 2
    assert request in out.requests
    rig.run()
    assert rig.all_finished


def test_the_interactive_prompt_goes_before_the_rest_of_a_long_one():
    rig = Clocked(scheduling_policy="priority", max_num_batched_tokens=16)
    document = rig.add(60, 2, priority=2)
    rig.step()
    request = rig.add(14, 2, priority=0)
    out = rig.step()
    assert dict(zip(out.requests, out.num_scheduled_tokens)) == {request: 14, document: 2}
    out = rig.step()
    assert dict(zip(out.requests, out.num_scheduled_tokens)) == {request: 1, document: 15}


def test_an_interactive_prompt_of_several_chunks_keeps_its_precedence():
    rig = Clocked(scheduling_policy="priority", max_num_batched_tokens=16)
    document = rig.add(60, 2, priority=2)
    rig.step()
    request = rig.add(40, 2, priority=0)
    steps = [dict(zip(out.requests, out.num_scheduled_tokens)) for out in (rig.step(), rig.step(), rig.step())]
    assert steps == [{request: 15, document: 1}, {request: 15, document: 1}, {request: 10, document: 6}]


def test_no_request_gives_way_to_a_prompt_that_the_budget_passes_over():
    limits = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 10}
    rig = Clocked(scheduling_policy="priority", max_num_seqs=2, max_num_batched_tokens=16, **limits)
    rig.add(60, 2, priority=2)
    rig.add(2, 40, priority=2)
    rig.step()
    document = rig.add(50, 2, priority=0)
    while document.request_id not in rig.started:
        assert not rig.step().preempted or document.request_id in rig.started
    rig.run()
    assert rig.all_finished
    assert rig.scheduler.num_preempted_total == 1


def test_equal_classes_and_other_policies_preempt_no_request():
    rig = saturated()
    rig.add(3, 3, priority=2)
    assert not rig.step().preempted
    for policy in ("fcfs", "sjf", "edf"):
        rig = saturated(scheduling_policy=policy)
        rig.add(3, 1, priority=0, timeout=1)
        assert not rig.step().preempted


def test_a_request_that_has_waited_out_its_patience_is_not_preempted():
    rig = saturated(priority_aging_seconds=5)  # class 2 is due 10 seconds after its arrival
    rig.now = 11
    rig.add(3, 3, priority=0)
    assert not rig.step().preempted


def test_an_aged_request_is_no_victim_of_later_arrivals():
    policies = make_policies(EngineConfig(model="none", scheduling_policy="priority", priority_aging_seconds=10))
    batch = Request(0, [1], SamplingParams(), arrival_time=0.0, priority=2)
    early, late = (Request(i, [1], SamplingParams(), arrival_time=t) for i, t in ((1, 19.0), (2, 21.0)))
    running: list[Request] = []
    for request in (batch, late, early):
        running.insert(policies.order.position(request, running), request)
    assert running == [early, batch, late]
    assert policies.victim(running) is late
    assert policies.victim(running[:2]) is batch


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 2)), min_size=4, max_size=20),
    st.integers(1, 6),  # max_num_seqs
    st.integers(16, 40),  # blocks
    st.integers(8, 64),  # token budget
    st.integers(1, 30),  # steps before the interactive request
    st.integers(1, 60),  # tokens of its prompt
    st.booleans(),
)
def test_first_token_within_two_steps_and_the_prefill(batch, max_num_seqs, blocks, budget, before, prompt, overlap):
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "async_scheduling": overlap}
    rig = Clocked(blocks, scheduling_policy="priority", **options)
    for tokens, output, n in batch:
        rig.add(tokens, output, n=n, priority=2)
    for _ in range(before):
        rig.step()
    request = rig.add(prompt, 2, priority=0)
    prefill = -(-prompt // (budget - max_num_seqs))  # one token of each step is left to each running request
    for _ in range(2 + prefill):
        rig.step()
    assert request.num_output_tokens >= 1
    rig.run()
    assert rig.all_finished


def test_shortest_first_and_earliest_deadline_first():
    rig = Clocked(scheduling_policy="sjf", max_num_seqs=1)
    for output in (4, 9, 2, 30, 5):
        rig.add(2, output)
    rig.run()
    assert rig.order() == [2, 0, 4, 1, 3]
    rig = Clocked(scheduling_policy="edf", max_num_seqs=1, edf_default_timeout=50)
    for timeout in (90, 30, None, 49, 51):
        rig.add(2, 3, timeout=timeout)
    rig.run()
    assert rig.order() == [1, 3, 2, 4, 0], "without a timeout the default one counts"


def test_equal_requests_are_served_in_order_of_arrival():
    for policy in POLICIES:
        rig = Clocked(scheduling_policy=policy, max_num_seqs=1)
        for _ in range(6):
            rig.add(2, 2)
        rig.run()
        assert rig.order() == list(range(6))
        assert all(a < b for a, b in pairwise(rig.started[i] for i in range(6)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_class_has_its_own_queue_limit(policy):
    limits = {"0": {"max_queue_size": 2}, "2": {"max_queue_size": 1}}
    rig = Clocked(scheduling_policy=policy, max_num_seqs=1, priority_classes=limits)
    rig.add(2, 4, priority=1)
    rig.step()
    rig.add(2, 2, priority=2)
    refused = rig.try_add(2, 2, priority=2)
    assert refused is not None
    assert refused.code == "UNAVAILABLE"
    assert refused.message.startswith("the queue of priority class 2 is full: 1 sequences")  # the gateway reads it
    assert "max_queue_size=1" in refused.message
    rig.add(2, 2, priority=0)
    rig.add(2, 2, priority=0)
    assert "priority class 0" in rig.try_add(2, 2, priority=0).message
    for _ in range(5):
        rig.add(2, 2, priority=1)  # no limit of its own
    rig.run()
    rig.add(2, 2, priority=2)  # ended requests give their places back
    rig.core.abort(rig.requests[len(rig.requests) - 1].request_id)
    rig.add(2, 2, priority=2)
    rig.run()


def test_requests_that_could_start_at_once_do_not_fill_the_queue():
    rig = Clocked(scheduling_policy="priority", max_num_seqs=4, priority_classes={"2": {"max_queue_size": 1}})
    for _ in range(5):
        rig.add(2, 2, priority=2)
    assert rig.try_add(2, 2, priority=2) is not None


def test_scheduling_fields_reach_the_request():
    rig = Clocked(scheduling_policy="edf")
    request = rig.add(2, 2, priority=3, tenant="gold", timeout=7)
    assert (request.priority, request.tenant, request.deadline, request.arrival_time) == (3, "gold", 7.0, 0.0)
