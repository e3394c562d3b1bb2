"""The completion-locked schedule: its batches, its idle slots and the costs of its steps."""

from __future__ import annotations

import itertools

import pytest
from engine_rig import Info, add, run_until_idle
from trace_rig import traced_core

from inflight.engine.policies.cost_model import StepCost, StepLoad
from inflight.engine.step_trace import FORMAT, StepRecord, Trace
from inflight_tools.trace.html import static_requests
from inflight_tools.trace.static_baseline import StaticRequest, fit_step_cost, schedule_static, seconds_of_steps
from inflight_tools.trace.timeline import Timeline, build_timeline


def requests(*outputs: int, prompt: int = 10, arrivals: list[float] | None = None) -> list[StaticRequest]:
    times = arrivals or [0.0] * len(outputs)
    return [StaticRequest(str(i), times[i], prompt, output) for i, output in enumerate(outputs)]


def test_a_batch_lasts_as_long_as_its_longest_output_and_the_others_idle():
    cost = StepCost.linear(1.0)  # a second per step, whatever its load
    schedule = schedule_static(requests(4, 2, 1, 3), cost, batch_size=2)
    first, second = schedule.batches
    assert (first.start, first.prefill_end, first.end, first.iterations) == (0.0, 1.0, 4.0, 4)
    assert [slot.busy_end for slot in first.slots] == [4.0, 2.0]
    assert (second.start, second.end) == (4.0, 7.0)
    assert [slot.busy_end for slot in second.slots] == [5.0, 7.0]
    # 2 slots x (4 + 3) iterations, 4 + 2 + 1 + 3 tokens
    assert schedule.idle_share == pytest.approx(1 - 10 / 14)
    assert schedule.end == 7.0


def test_padding_and_finished_rows_are_paid_for():
    cost = StepCost.linear(0.5, per_sequence=0.1, per_prefill_token=0.01)
    pair = [StaticRequest("long", 0.0, 100, 3), StaticRequest("short", 0.0, 10, 3)]
    (batch,) = schedule_static(pair, cost, batch_size=2).batches
    assert batch.prefill_end - batch.start == pytest.approx(0.5 + 2 * 0.1 + 2 * 100 * 0.01), (
        "both are padded to the longest"
    )
    assert batch.end - batch.prefill_end == pytest.approx(2 * (0.5 + 2 * 0.1)), "both rows decode to the end"


def test_a_batch_waits_to_fill_but_no_longer_than_the_delay():
    cost = StepCost.linear(1.0)
    arrivals = [0.0, 0.01, 0.02, 0.5, 9.0]
    batches = schedule_static(requests(2, 2, 2, 2, 2, arrivals=arrivals), cost, batch_size=3, queue_delay=0.1).batches
    assert [len(batch.slots) for batch in batches] == [3, 1, 1]
    assert [batch.start for batch in batches] == pytest.approx([0.02, 2.02, 9.1])
    late = schedule_static(requests(1, 1, arrivals=[0.0, 5.0]), cost, batch_size=8).batches
    assert [batch.start for batch in late] == pytest.approx([0.1, 5.1])


def test_slots_that_no_request_had_arrived_for_are_not_idle():
    one = schedule_static(requests(3), StepCost.linear(1.0), batch_size=8)
    assert (one.idle_share, one.seconds) == (0.0, 3.0)
    empty = schedule_static([], StepCost.linear(1.0))
    assert (empty.end, empty.seconds, empty.idle_share) == (0.0, 0.0, 0.0)


def traced(arrivals: list[int], **options: int) -> Timeline:
    """An engine that gets so many requests, runs until it is idle, and waits for the next ones."""
    core = traced_core(Info(max_model_len=64, num_blocks=64), max_num_seqs=8, enable_prefix_caching=True, **options)
    ids = itertools.count()
    for number in arrivals:
        for _ in range(number):
            request_id = next(ids)
            add(core, request_id, [*range(1, 10), request_id], max_tokens=2 + 5 * (request_id % 4), ignore_eos=True)
        run_until_idle(core, {}, {})
        for _ in range(5000):
            core.clock()
    return build_timeline(core.trace.snapshot())


def test_at_light_load_both_cost_the_same():
    """Requests that come one by one are batches of one: idle time, waits for a batch to fill and empty slots are
    neither's cost, and both find the same in the prefix cache."""
    timeline = traced([1] * 6)
    found, cost = static_requests(timeline), fit_step_cost(timeline)
    assert len(found) == 6 and found[0].prompt > found[-1].prompt
    schedule = schedule_static(found, cost)
    assert all(batch.start >= request.arrival for batch, request in zip(schedule.batches, found))
    assert [len(batch.slots) for batch in schedule.batches] == [1] * 6
    assert schedule.seconds == pytest.approx(seconds_of_steps(timeline, {r.label for r in found}, cost))
    assert schedule.seconds < 200 < 20_000 < timeline.end
    assert schedule.idle_share == 0.0


def test_at_full_load_static_batches_cost_more():
    timeline = traced([16])
    found, cost = static_requests(timeline), fit_step_cost(timeline)
    schedule = schedule_static(found, cost, queue_delay=1000.0)  # ticks
    assert [len(batch.slots) for batch in schedule.batches] == [8, 8]
    labels = {request.label for request in found}
    assert schedule.seconds > 1.1 * seconds_of_steps(timeline, labels, cost)
    assert seconds_of_steps(timeline, set(), cost) == 0.0
    assert schedule.idle_share > 0.3


def timeline(steps: list[tuple[int, int, float]]) -> Timeline:
    """Steps of (decodes, tokens of one prefill, seconds)."""
    records = [
        StepRecord(i, 0.0, 0.0, s, 0.0, 0.0, 0.0, 0, 0, 0, 0, list(range(d + (p > 0))), [], [], [], [], [])
        for i, (d, p, s) in enumerate(steps)
    ]
    trace = Trace(FORMAT, 0.0, "m", 8, 8, 1, 1, [], records)
    return Timeline(trace, 0.0, 1.0, [], [p for _, p, _ in steps], [d for d, _, _ in steps], [0] * len(steps))


def test_the_fit_recovers_the_costs():
    work = [
        (d, p, 0.004 + 0.0003 * (d + (p > 0)) + 0.00002 * p)
        for d, p in itertools.product(range(1, 20, 3), (0, 64, 100))
    ]
    found = fit_step_cost(timeline(work))
    coefficients = found.seconds_at[0], found.per_sequence, found.per_prefill_token
    assert coefficients == pytest.approx((0.004, 0.0003, 0.00002))


def test_a_hiccup_of_the_machine_is_not_a_cost():
    steady = [(d, 0, 0.004 + 0.0003 * d) for d in range(1, 9)] * 20
    hiccup = fit_step_cost(timeline([*steady, (4, 0, 3.0)]))
    assert hiccup.seconds(StepLoad(4)) == pytest.approx(0.0052)


def test_no_coefficient_is_negative_whatever_the_steps():
    falling = fit_step_cost(timeline([(1, 0, 0.010), (8, 0, 0.008), (16, 0, 0.007)]))
    assert min(falling.seconds_at[0], falling.per_sequence, falling.per_prefill_token) >= 0
    assert falling.seconds(StepLoad(8)) == pytest.approx(0.025 / 3, rel=0.2)
    one = fit_step_cost(timeline([(2, 0, 0.010)]))
    assert one.seconds(StepLoad(2)) == pytest.approx(0.010)
