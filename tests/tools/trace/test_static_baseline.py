"""The completion-locked schedule: its batches, its idle slots and the costs of its steps."""

from __future__ import annotations

import itertools

import pytest

from inflight.engine.policies.cost_model import StepCost, StepLoad
from inflight.engine.step_trace import FORMAT, StepRecord, Trace
from inflight_tools.trace.static_baseline import StaticRequest, fit_step_cost, schedule_static
from inflight_tools.trace.timeline import Timeline


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


def test_empty_slots_count_as_idle():
    assert schedule_static(requests(3), StepCost.linear(1.0), batch_size=8).idle_share == pytest.approx(7 / 8)
    empty = schedule_static([], StepCost.linear(1.0))
    assert (empty.end, empty.idle_share) == (0.0, 0.0)


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
