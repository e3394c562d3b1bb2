"""Slices of scripted schedules, on a clock that ticks at every reading."""

from __future__ import annotations

import random

from drafters import HashDrafter
from engine_rig import Info, add, make_core, run_until_idle
from trace_rig import traced_core

from inflight_tools.trace.timeline import Row, Timeline, build_timeline


def timeline_of(core) -> Timeline:
    run_until_idle(core, {}, {})
    return build_timeline(core.trace.snapshot())


def brief(row: Row) -> list[tuple]:
    return [(s.kind, s.start, s.end, s.tokens, s.computed) for s in row.slices]


def test_a_chunked_prompt_beside_one_that_waits_for_budget():
    core = traced_core(Info(), max_num_batched_tokens=8)
    add(core, 1, list(range(1, 11)), max_tokens=3, ignore_eos=True)
    add(core, 2, [7, 8, 9], max_tokens=2, ignore_eos=True)
    timeline = timeline_of(core)
    first, second = timeline.rows
    assert brief(first) == [
        ("waiting", 0, 2, 0, 0),
        ("prefill", 2, 5, 8, 0),
        ("prefill", 6, 9, 2, 8),
        ("decode", 10, 13, 1, 10),
        ("decode", 14, 17, 1, 11),
    ]
    assert brief(second) == [
        ("waiting", 1, 6, 0, 0),
        ("prefill", 6, 9, 3, 0),
        ("decode", 10, 13, 1, 3),
    ]
    assert (first.first_token, second.first_token) == (9, 9)
    assert timeline.prefill_tokens == [8, 5, 0, 0]
    assert timeline.decode_tokens == [0, 0, 2, 1]
    assert (timeline.origin, timeline.end) == (1, 17)


def test_a_preempted_sequence_is_recomputed():
    core = traced_core(Info(max_model_len=16, num_blocks=4), max_num_batched_tokens=8)
    add(core, 1, [1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
    add(core, 2, [7, 8, 9], max_tokens=7, ignore_eos=True)
    first, second = timeline_of(core).rows
    assert [s.kind for s in first.slices] == ["waiting", "prefill", *["decode"] * 5]
    assert brief(second) == [
        ("waiting", 1, 2, 0, 0),
        ("prefill", 2, 5, 3, 0),
        ("decode", 6, 9, 1, 3),
        ("decode", 10, 13, 1, 4),
        ("decode", 14, 17, 1, 5),
        ("preempted", 18, 26, 0, 0),
        ("prefill", 26, 29, 7, 0),  # the prompt and the output so far, in one chunk
        ("decode", 30, 33, 1, 7),
        ("decode", 34, 37, 1, 8),
    ]
    assert second.first_token == 5, "it got its first token before it was preempted"


def test_a_running_sequence_that_gets_no_budget_waits():
    core = traced_core(Info(), max_num_batched_tokens=1)
    add(core, 1, [1], max_tokens=3, ignore_eos=True)
    add(core, 2, [2], max_tokens=2, ignore_eos=True)
    first, second = timeline_of(core).rows
    assert [s.kind for s in first.slices] == ["waiting", "prefill", "decode", "decode"]
    assert [s.kind for s in second.slices] == ["waiting", "prefill", "decode"]
    assert second.slices[0].end == second.slices[1].start == first.slices[-1].end + 1


def test_a_row_with_drafts_decodes_and_its_refused_ones_are_apart():
    core = traced_core(Info())
    core.scheduler.policies.drafter = HashDrafter("half", 3)
    add(core, 1, [1, 2, 3], max_tokens=8, ignore_eos=True)
    timeline = timeline_of(core)
    (row,) = timeline.rows
    assert [s.kind for s in row.slices[:2]] == ["waiting", "prefill"]
    ran = row.slices[1:]
    assert {s.kind for s in ran[1:]} == {"decode"}
    assert sum(1 + s.accepted for s in ran) == 8
    assert timeline.refused_tokens == [s.drafts - s.accepted for s in ran]
    assert sum(timeline.refused_tokens) > 0
    assert timeline.prefill_tokens == [3 + ran[0].accepted, *[0] * len(ran[1:])]
    assert timeline.decode_tokens == [0, *(1 + s.accepted for s in ran[1:])]


def test_refused_drafts_are_not_caught_up_on_after_a_preemption():
    core = traced_core(Info(max_model_len=16, num_blocks=4), max_num_batched_tokens=16)
    core.scheduler.policies.drafter = HashDrafter("wrong", 2)
    add(core, 1, [1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
    add(core, 2, [7, 8, 9], max_tokens=7, ignore_eos=True)
    rows = timeline_of(core).rows
    again = [row.slices[i + 1 :] for row in rows for i, s in enumerate(row.slices) if s.kind == "preempted"]
    assert again, "this case must preempt"
    for slices in again:
        assert [s.kind for s in slices] == ["prefill", *["decode"] * (len(slices) - 1)]


def test_prefix_cache_hits_are_not_computed():
    core = traced_core(Info(), enable_prefix_caching=True)
    for request_id in (1, 2):
        add(core, request_id, list(range(1, 11)), max_tokens=1)
        run_until_idle(core, {}, {})
    first, second = build_timeline(core.trace.snapshot()).rows
    assert brief(first)[1][3:] == (10, 0)
    assert brief(second)[1][3:] == (2, 8)
    assert second.whole


def test_a_sequence_whose_start_left_the_ring_is_not_whole():
    core = make_core(Info(), step_trace=4)
    add(core, 1, [1, 2, 3], max_tokens=8, ignore_eos=True)
    (row,) = timeline_of(core).rows
    assert not row.whole
    assert row.first_token is None
    assert [s.kind for s in row.slices] == ["decode"] * 4


def test_in_any_schedule_slices_add_up_to_the_tokens_and_do_not_overlap():
    rng = random.Random(7)
    core = make_core(Info(num_blocks=24), step_trace=True, block_size=4, max_num_seqs=6, max_num_batched_tokens=12)
    lengths = {}
    for request_id in range(25):
        lengths[request_id] = (rng.randrange(1, 30), rng.randrange(1, 20))
        prompt = [rng.randrange(1, 50) for _ in range(lengths[request_id][0])]
        add(core, request_id, prompt, max_tokens=lengths[request_id][1], ignore_eos=True, n=rng.choice([1, 1, 2]))
        for _ in range(rng.randrange(3)):
            core.step()
    timeline = timeline_of(core)
    assert core.scheduler.num_preempted_total, "this case must preempt"
    assert sum(timeline.prefill_tokens) + sum(timeline.decode_tokens) == sum(
        sum(step.tokens) for step in timeline.steps
    )
    for row in timeline.rows:
        prompt, output = lengths[row.request.request_id]
        assert all(a.end <= b.start for a, b in zip(row.slices, row.slices[1:])), "slices overlap"
        assert all(s.start <= s.end for s in row.slices)
        decodes = sum(s.kind == "decode" for s in row.slices)
        preempted = sum(s.kind == "preempted" for s in row.slices)
        assert output - 1 - preempted <= decodes <= output - 1
        last = [s for s in row.slices if s.step is not None][-1]
        assert last.computed + last.tokens == prompt + output - 1


def test_a_trace_without_steps_is_an_empty_timeline():
    core = make_core(Info(), step_trace=True)
    timeline = build_timeline(core.trace.snapshot())
    assert (timeline.rows, timeline.end) == ([], 0.0)


def test_time_without_a_request_is_not_open_and_tokens_before_the_trace_do_not_count():
    core = traced_core(Info())
    clock = core.clock
    for request_id in range(3):
        add(core, request_id, [1, 2, 3], max_tokens=4, ignore_eos=True)
        run_until_idle(core, {}, {})
        for _ in range(1000):  # the clock ticks, and nothing is open
            clock()
    timeline = build_timeline(core.trace.snapshot())
    assert timeline.num_output_tokens == 3 * 4
    assert timeline.end > 2000 and timeline.open_seconds < 100
    short = build_timeline(core.trace.snapshot().last(2))  # decodes of the last request
    assert short.num_output_tokens == 2
    assert short.open_seconds == short.end
