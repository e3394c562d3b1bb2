"""Which request gives way under each victim policy."""

from __future__ import annotations

from engine_rig import Info, make_core, run_until_idle

from inflight.engine.messages import AddRequest
from inflight.engine.policies.victims import least_preempted, longest, lowest_priority
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams


def candidate(request_id: int, *, priority: int = 0, arrival: float = 0.0, tokens: int = 4, preemptions: int = 0):
    request = Request(request_id, [1] * tokens, SamplingParams(), arrival_time=arrival, priority=priority)
    request.num_preemptions = preemptions
    return request


def test_lowest_priority_then_latest_arrival():
    candidates = [
        candidate(1, arrival=3.0),
        candidate(2, arrival=1.0, priority=2),
        candidate(3, arrival=2.0, priority=2),
    ]
    assert lowest_priority(candidates).request_id == 3
    assert lowest_priority([*candidates[:1], candidate(4, arrival=2.0)]).request_id == 1, (
        "the latest arrival, wherever it runs"
    )


def test_longest():
    candidates = [candidate(1, tokens=9), candidate(2, tokens=12), candidate(3, tokens=12, arrival=1.0), candidate(4)]
    assert longest(candidates).request_id == 3


def test_least_preempted_then_lowest_priority_then_latest_arrival():
    candidates = [
        candidate(1, preemptions=1, arrival=9.0),
        candidate(2, arrival=1.0),
        candidate(3, priority=1),
        candidate(4, arrival=2.0),
    ]
    assert least_preempted(candidates).request_id == 3
    assert least_preempted(candidates[:2] + candidates[3:]).request_id == 4


def test_model_json_selects_the_policy():
    """Three requests outgrow the pool; the first one to give way differs."""
    preempted = {}
    for policy in ("last", "lowest_priority", "longest"):
        core = make_core(Info(num_blocks=24), block_size=4, preemption_victim=policy, enable_prefix_caching=False)
        for request_id, (length, priority) in enumerate([(8, 1), (30, 0), (20, 0)]):
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=30, ignore_eos=True)
            core.add_request(AddRequest(request_id, [request_id + 1] * length, params, priority=priority))
        requests = [sequences[0] for sequences in core._live.values()]
        while not core.scheduler.num_preempted_total:
            core.step()
        preempted[policy] = next(r.request_id for r in requests if r.num_preemptions)
        run_until_idle(core, {}, {})
    assert preempted == {"last": 2, "lowest_priority": 0, "longest": 1}


def test_the_default_keeps_the_guarantees_of_the_order():
    """An aged batch request ranks ahead of a fresh interactive one, which gives way to it."""
    core = make_core(Info(num_blocks=20), block_size=4, scheduling_policy="priority", priority_aging_seconds=10)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
    for request_id, (priority, arrival) in enumerate([(2, 0.0), (0, 100.0)]):
        message = AddRequest(request_id, [request_id + 1] * 20, params, priority=priority, arrival=arrival)
        assert core.add_request(message) is None
    aged, fresh = (sequences[0] for sequences in core._live.values())
    run_until_idle(core, {}, {})
    assert (aged.num_preemptions, fresh.num_preemptions) == (0, 1)
