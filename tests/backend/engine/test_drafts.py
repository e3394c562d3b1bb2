"""Rows of several tokens: drafts change only how many steps a request takes."""

from __future__ import annotations

import pytest
from drafters import HashDrafter
from engine_rig import Info, add, collect, expected_output, make_core, run_until_idle
from panics import Panic

from inflight.engine.drafting.safe_drafter import SafeDrafter
from inflight.engine.integrity import check_core
from inflight.engine.logprobs import Logprobs


def drafted(kind: str, length: int = 4, info: Info | None = None, **options):
    core = make_core(info or Info(), **options)
    core.scheduler.policies.drafter = HashDrafter(kind, length)
    return core


@pytest.mark.parametrize("overlap", [False, True])
def test_right_drafts_yield_several_tokens_a_step(overlap):
    core = drafted("right", async_scheduling=overlap)
    params = add(core, 1, [1, 2, 3], max_tokens=20, ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert outputs[1, 0] == expected_output([1, 2, 3], params, core.info)[0]
    assert len(core.runner.batch_sizes) == 4, "five tokens a step, the prompt's step included"


def test_wrong_drafts_cost_no_extra_step():
    core = drafted("wrong")
    params = add(core, 1, [1, 2, 3], max_tokens=20, ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert outputs[1, 0] == expected_output([1, 2, 3], params, core.info)[0]
    assert len(core.runner.batch_sizes) == 20
    assert (core.runner.num_accepted, core.scheduler.policies.drafter.num_accepted) == (0, 0)
    assert core.runner.num_drafts == core.scheduler.policies.drafter.num_drafts > 0


def test_a_stop_token_among_drafts_ends_the_request_there():
    free = make_core(Info())
    params = add(free, 1, [3, 1, 4], max_tokens=12, ignore_eos=True)
    expected = expected_output([3, 1, 4], params, free.info)[0]
    stop = next(token for index, token in enumerate(expected) if index in (1, 2, 3) and token not in expected[:index])
    core = drafted("right", length=11)
    add(core, 1, [3, 1, 4], max_tokens=12, ignore_eos=True, stop_token_ids=[stop], logprobs=None)
    message = core.step()
    (delta,) = message.deltas
    assert delta.token_ids == expected[: expected.index(stop) + 1]
    assert (delta.finish_reason, delta.stop_token) == ("stop", stop)
    check_core(core)
    assert not core.has_work


def test_blocks_of_refused_drafts_are_freed_immediately():
    core = drafted("wrong", length=8, block_size=2, enable_prefix_caching=False)
    add(core, 1, [1, 2, 3], max_tokens=30, ignore_eos=True)
    for step in range(1, 6):
        core.step()
        check_core(core)
        (request,) = core.scheduler.running
        assert request.num_tokens == 3 + step
        assert request.num_computed_tokens == 2 + step
        assert core.pool.num_used == core.pool.blocks_for(request.num_tokens)


def test_drafts_use_only_the_rest_of_the_step():
    core = drafted("right", length=8, max_num_batched_tokens=6)
    add(core, 1, [1, 2, 3], max_tokens=30, ignore_eos=True)
    out = core.scheduler.schedule()
    assert (out.num_tokens, len(out.draft_token_ids[0])) == (6, 3)
    core.scheduler.update(out, core.runner.launch(out))
    add(core, 2, [9] * 20, max_tokens=5)
    out = core.scheduler.schedule()
    assert (out.num_scheduled_tokens, out.draft_token_ids) == ([1, 5], {}), "a prompt comes before drafts"


def test_drafts_preempt_no_request_and_take_only_available_blocks():
    core = drafted("right", length=8, info=Info(num_blocks=16), block_size=4, enable_prefix_caching=False)
    params = {i: add(core, i, [i + 1] * 27, max_tokens=30, ignore_eos=True) for i in range(2)}
    out = core.scheduler.schedule()
    assert not out.preempted and len(out.draft_token_ids) == 2
    assert core.pool.num_available == 0
    assert [len(drafts) for drafts in out.draft_token_ids.values()] == [8, 1], (
        "the second gets what its blocks have room for"
    )
    core.scheduler.update(out, core.runner.launch(out))
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    for i in range(2):
        whole = expected_output([i + 1] * 27, params[i], core.info)[0]
        assert whole[-len(outputs[i, 0]) :] == outputs[i, 0]


def test_a_request_with_drafts_in_flight_sits_out_the_next_step():
    core = drafted("half", async_scheduling=True)
    params = {i: add(core, i, [i + 1, 2], max_tokens=15, ignore_eos=True) for i in range(3)}
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    for i in range(3):
        assert outputs[i, 0] == expected_output([i + 1, 2], params[i], core.info)[0]
    assert core.runner.num_accepted > 0


def test_a_request_preempted_with_drafts_in_flight_keeps_the_accepted_ones():
    core = drafted(
        "right", info=Info(num_blocks=16, num_host_blocks=100), async_scheduling=True, block_size=4,
        enable_prefix_caching=False, swap_space="1MiB", preemption_mode="swap", scheduling_policy="priority",
    )  # fmt: skip
    low = add(core, 1, [1] * 20, {"priority": 9, "arrival": 0.0}, max_tokens=40, ignore_eos=True)
    outputs, reasons = {}, {}
    collect(core, outputs, reasons)
    high = add(core, 2, [2] * 40, {"priority": 0, "arrival": 0.0}, max_tokens=20, ignore_eos=True)
    run_until_idle(core, outputs, reasons)
    assert core.scheduler.num_preempted_total >= 1
    assert outputs[1, 0] == expected_output([1] * 20, low, core.info)[0]
    assert outputs[2, 0] == expected_output([2] * 40, high, core.info)[0]


def test_logprobs_come_with_each_token_of_a_run():
    core = drafted("right")
    add(core, 1, [1, 2, 3], max_tokens=7, ignore_eos=True, logprobs=0)
    execute = core.runner.execute

    def with_logprobs(out, prepared):
        step = execute(out, prepared)
        step.logprobs = {row: Logprobs.of([(token, -0.5, 1)] for token in run) for row, run in step.token_runs.items()}
        return step

    core.runner.execute = with_logprobs
    deltas = []
    while core.has_work:
        deltas += core.step().deltas
    assert [len(delta.token_ids) for delta in deltas] == [5, 2]
    for delta in deltas:
        assert [entry[0][0] for entry in delta.logprobs] == delta.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_no_draft_reaches_past_the_end_of_its_request(max_tokens):
    core = drafted("eager", max_num_batched_tokens=64)
    add(core, 1, [1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
    out = core.scheduler.schedule()
    drafts = out.draft_token_ids.get(0, [])
    assert len(drafts) == max_tokens - 1, "the target's sample is the last token that it may yield"
    core.scheduler.update(out, core.runner.launch(out))
    assert not core.has_work


@pytest.mark.parametrize("error", [IndexError, Panic])
@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_drafter_that_raises_affects_no_request(method, error, monkeypatch, caplog):
    core = drafted("right")
    params = {number: add(core, number, [1, 2, number], max_tokens=20, ignore_eos=True) for number in (3, 4)}
    drafter = core.scheduler.policies.drafter
    core.scheduler.policies.drafter = SafeDrafter(drafter)
    works = getattr(drafter, method)

    def failing(request, *args):
        if request.request_id == 4:
            raise error("no such suffix")
        return works(request, *args)

    monkeypatch.setattr(drafter, method, failing)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    for number in (3, 4):
        assert outputs[number, 0] == expected_output([1, 2, number], params[number], core.info)[0]
    assert drafter.num_accepted > 0
    assert caplog.text.count("HashDrafter raised") == 1
