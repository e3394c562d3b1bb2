"""The completion-locked picture: batches, idle slots and the costs of their steps."""

from __future__ import annotations

import pytest

from inflight.engine.step_trace import FORMAT, StepRecord, Trace
from inflight_tools.trace.static_baseline import Job, StepCost, fit_step_cost, schedule_static
from inflight_tools.trace.timeline import Timeline


def jobs(*outputs: int, prompt: int = 10, arrivals: list[float] | None = None) -> list[Job]:
    times = arrivals or [0.0] * len(outputs)
    return [Job(str(i), times[i], prompt, output) for i, output in enumerate(outputs)]


def test_a_batch_lasts_as_long_as_its_longest_and_the_others_idle():
    cost = StepCost(fixed=1.0, per_decode=0.0, per_prefill=0.0)  # one second a step, whatever is in it
    schedule = schedule_static(jobs(4, 2, 1, 3), cost, batch_size=2)
    first, second = schedule.batches
    assert (first.start, first.prefill_end, first.end, first.iterations) == (0.0, 1.0, 4.0, 4)
    assert [slot.busy_end for slot in first.slots] == [4.0, 2.0]
    assert (second.start, second.end) == (4.0, 7.0)
    assert [slot.busy_end for slot in second.slots] == [5.0, 7.0]
    # 2 slots x (4 + 3) iterations, 4 + 2 + 1 + 3 tokens
    assert schedule.idle_share == pytest.approx(1 - 10 / 14)
    assert schedule.end == 7.0


def test_padding_and_empty_rows_cost_what_they_cost():
    cost = StepCost(fixed=0.5, per_decode=0.1, per_prefill=0.01)
    work = [Job("long", 0.0, 100, 3), Job("short", 0.0, 10, 3)]
    (batch,) = schedule_static(work, cost, batch_size=2).batches
    assert batch.prefill_end - batch.start == pytest.approx(0.5 + 2 * 100 * 0.01), "both are padded to the longest"
    assert batch.end - batch.prefill_end == pytest.approx(2 * (0.5 + 2 * 0.1)), "both rows decode to the end"


def test_a_batch_waits_to_fill_up_but_not_longer_than_the_delay():
    cost = StepCost(1.0, 0.0, 0.0)
    arrivals = [0.0, 0.01, 0.02, 0.5, 9.0]
    batches = schedule_static(jobs(2, 2, 2, 2, 2, arrivals=arrivals), cost, batch_size=3, queue_delay=0.1).batches
    assert [len(batch.slots) for batch in batches] == [3, 1, 1]
    assert [batch.start for batch in batches] == pytest.approx([0.02, 2.02, 9.1])
    late = schedule_static(jobs(1, 1, arrivals=[0.0, 5.0]), cost, batch_size=8).batches
    assert [batch.start for batch in late] == pytest.approx([0.1, 5.1])


def test_slots_that_no_request_fills_count_as_idle():
    assert schedule_static(jobs(3), StepCost(1, 0, 0), batch_size=8).idle_share == pytest.approx(7 / 8)
    empty = schedule_static([], StepCost(1, 0, 0))
    assert (empty.end, empty.idle_share) == (0.0, 0.0)


def timeline(steps: list[tuple[int, int, float]]) -> Timeline:
    records = [
        StepRecord(i, 0.0, 0.0, s, 0.0, 0.0, 0.0, 0, 0, 0, 0, [], [], [], [], [], []) for i, (*_, s) in enumerate(steps)
    ]
    trace = Trace(FORMAT, 0.0, "m", 8, 8, 1, 1, [], records)
    return Timeline(trace, 0.0, 1.0, [], [p for _, p, _ in steps], [d for d, _, _ in steps])


def test_the_costs_are_found_again():
    work = [(d, p, 0.004 + 0.0003 * d + 0.00002 * p) for d in range(1, 20, 3) for p in (0, 64, 100)]
    found = fit_step_cost(timeline(work))
    assert (found.fixed, found.per_decode, found.per_prefill) == pytest.approx((0.004, 0.0003, 0.00002))


def test_no_cost_is_negative_however_the_steps_lie():
    falling = fit_step_cost(timeline([(1, 0, 0.010), (8, 0, 0.008), (16, 0, 0.007)]))
    assert min(falling.fixed, falling.per_decode, falling.per_prefill) >= 0
    assert falling.seconds(8, 0) == pytest.approx(0.025 / 3, rel=0.2)
    one = fit_step_cost(timeline([(2, 0, 0.010)]))
    assert one.seconds(2, 0) == pytest.approx(0.010)
