"""The step trace records every step and is bounded."""

from __future__ import annotations

import msgspec
import pytest
from drafters import HashDrafter
from engine_rig import Info, add, make_core, run_until_idle
from trace_rig import traced_core

from inflight.config import ConfigError, EngineConfig
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import Trace, TraceError, sequence_key


def finished_core(limit: int, requests: int, **options):
    core = make_core(Info(), step_trace=limit, **options)
    for request_id in range(requests):
        add(core, request_id, [1 + request_id % 40, 2, 3], max_tokens=4, ignore_eos=True)
        run_until_idle(core, {}, {})
    return core


def test_it_is_off_by_default_and_then_nothing_is_kept():
    core = make_core(Info())
    add(core, 1, [1, 2, 3])
    run_until_idle(core, {}, {})
    assert core.trace is None


def test_the_key_is_a_switch_or_a_number_of_steps():
    for value, steps in [(True, 4096), (False, 0), (1, 1), (77, 77)]:
        assert EngineConfig.from_dict({"model": "m", "step_trace": value}).num_traced_steps == steps


def test_any_other_value_is_an_error_that_names_the_key():
    for value in [0, -1, 2_000_000, "on", 1.5]:
        with pytest.raises(ConfigError, match="step_trace"):
            EngineConfig.from_dict({"model": "m", "step_trace": value})


def test_a_step_is_recorded_as_it_was():
    core = traced_core(Info(), max_num_batched_tokens=8, short_prompt_share=0.0)
    add(core, 1, list(range(1, 11)), max_tokens=3, ignore_eos=True)
    add(core, 2, [7, 8, 9], max_tokens=2, ignore_eos=True)
    run_until_idle(core, {}, {})
    trace = core.trace.snapshot()
    a, b = sequence_key(1, 0), sequence_key(2, 0)
    assert [(s.keys, s.tokens, s.computed, s.samples) for s in trace.steps] == [
        ([a], [8], [0], [False]),
        ([a, b], [2, 3], [8, 0], [True, True]),
        ([a, b], [1, 1], [10, 3], [True, True]),
        ([a], [1], [11], [True]),
    ]
    assert [s.number for s in trace.steps] == [0, 1, 2, 3]
    assert [s.ended for s in trace.steps] == [[], [], [b], [a]]
    assert [s.waiting for s in trace.steps] == [1, 0, 0, 0]
    assert [s.blocks_used + s.blocks_free for s in trace.steps] == [64] * 4
    # The clock ticks at every reading: begin, scheduled, executed, end.
    step = trace.steps[0]
    assert (step.start, step.schedule, step.forward, step.update, step.end) == (3, 1, 1, 1, 6)
    first, second = trace.requests
    assert (first.request_id, first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (1, 1, 10, 3)
    assert (second.end, second.finish_reason) == (14, "length")


def test_drafts_are_recorded_with_what_became_of_them():
    core = traced_core(Info(), max_num_seqs=2)
    core.scheduler.policies.drafter = drafter = HashDrafter("half", 3)
    add(core, 1, [1, 2, 3], max_tokens=9, ignore_eos=True)
    add(core, 2, [4, 5], max_tokens=7, ignore_eos=True)
    run_until_idle(core, {}, {})
    trace = Trace.from_json(core.trace.snapshot().to_json())
    drafts = [counts for step in trace.steps for counts in step.drafts.values()]
    assert sum(tried for tried, _ in drafts) == drafter.num_drafts > 0
    assert 0 < sum(accepted for _, accepted in drafts) == drafter.num_accepted < drafter.num_drafts
    for step in trace.steps:
        assert all(step.tokens[place] == 1 + tried for place, (tried, _) in step.drafts.items() if step.computed[place])


def test_a_step_that_failed_accepted_no_drafts():
    core = traced_core(Info())
    core.scheduler.policies.drafter = HashDrafter("right", 3)
    add(core, 1, [1, 2, 3], max_tokens=9, ignore_eos=True)
    core.step()
    collect = core.runner.collect
    core.runner.collect = lambda ticket: msgspec.structs.replace(
        collect(ticket), token_ids=[], token_runs={}, failure="the device is gone"
    )
    core.step()
    assert core.trace.snapshot().steps[-1].drafts == {0: (3, 0)}


def test_the_runners_forward_end_separates_forward_from_sampling():
    core = traced_core(Info())
    execute = core.runner.execute

    def told(out, prepared):
        result = execute(out, prepared)
        result.forward_end = result.started + 0.25
        return result

    core.runner.execute = told
    add(core, 1, [1, 2], max_tokens=1)
    core.step()
    (step,) = core.trace.snapshot().steps
    assert (step.forward, step.sample) == (0.25, 0.75)


def test_the_ring_keeps_the_last_steps_and_their_sequences():
    core = finished_core(10, 40)
    trace = core.trace.snapshot()
    assert [step.number for step in trace.steps] == list(range(150, 160))
    named = {key for step in trace.steps for key in step.keys}
    assert {request.key for request in trace.requests} == named
    assert len(core.trace._ended) == len(named), "sequences outlive their steps"
    assert not core.trace._live


def test_running_and_waiting_sequences_are_in_the_snapshot():
    core = make_core(Info(), step_trace=3, max_num_seqs=1)
    add(core, 1, [1, 2], max_tokens=20, ignore_eos=True)
    add(core, 2, [3], max_tokens=2, ignore_eos=True)
    for _ in range(8):
        core.step()
    running, waiting = core.trace.snapshot().requests
    assert (running.request_id, running.num_output_tokens, running.end) == (1, 8, None)
    assert (waiting.request_id, waiting.num_output_tokens, waiting.finish_reason) == (2, 0, None)


def test_aborted_sequences_end_with_a_reason_and_leave_nothing_without_steps():
    core = make_core(Info(), step_trace=5)
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=3, seed=1)
    core.add_request(AddRequest(1, [1, 2, 3], params))
    core.step()
    core.abort(1)
    assert [request.finish_reason for request in core.trace.snapshot().requests] == ["abort"] * 3
    idle = make_core(Info(), step_trace=5)
    for request_id in range(20):
        idle.add_request(AddRequest(request_id, [1], params))
        idle.abort(request_id)
    assert not idle.trace._live and not idle.trace._ended


def test_empty_steps_and_what_is_sent_after_them_are_not_recorded():
    core = make_core(Info(), step_trace=True)
    add(core, 1, [1], max_tokens=1)
    core.step()
    core.trace.sent(0.5)
    core.step()
    core.trace.sent(9.0)
    (step,) = core.trace.snapshot().steps
    assert step.send == 0.5


def test_the_arrival_time_is_the_frontends():
    core = make_core(Info(), step_trace=True)
    core.add_request(AddRequest(1, [1], SamplingParams(seed=0), arrival=12.5))
    assert core.trace.snapshot().requests[0].arrival == 12.5


def test_a_trace_survives_its_file_and_other_files_are_rejected():
    trace = finished_core(10, 5).trace.snapshot()
    assert Trace.from_json(trace.to_json()) == trace
    for data in (b"{}", b"[1]", b"nonsense"):
        with pytest.raises(TraceError, match="not a step trace"):
            Trace.from_json(data)
    newer = msgspec.structs.replace(trace, format="inflight step trace 9")
    with pytest.raises(TraceError, match="step trace 9"):
        Trace.from_json(newer.to_json())


def test_the_last_steps_of_a_trace_contain_only_their_sequences():
    trace = finished_core(100, 5).trace.snapshot()
    short = trace.last(4)
    assert [step.number for step in short.steps] == [16, 17, 18, 19]
    assert [request.request_id for request in short.requests] == [4]
    assert len(trace.steps) == 20
