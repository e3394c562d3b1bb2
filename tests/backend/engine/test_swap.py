"""Preemption by swap: which blocks are copied, when it is chosen, and that nothing is lost."""

from __future__ import annotations

import pytest
from engine_rig import Info, add, collect, done_step, expected_output, make_core, run_until_idle

from inflight.engine.host_swap import SwapSpace
from inflight.engine.integrity import check_core
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.cost_model import StepCost
from inflight.engine.policies.recompute_cost import LearnedRecomputeCost
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput


def running(pool: KVPool, num_tokens: int, token: int = 1) -> Request:
    """A request with all tokens but the last computed and published."""
    request = Request(1, [token] * num_tokens, SamplingParams(), slot=0)
    pool.admit(request, pool.find_prefix(request))
    pool.extend(request, num_tokens - 1)
    request.num_computed_tokens = num_tokens - 1
    pool.publish(request, num_tokens - 1)
    return request


def copies(swap: SwapSpace) -> dict[int, int]:
    out = SchedulerOutput(slots=[0])
    swap.send(out)
    return out.swap_out


def test_a_request_resumes_with_all_of_its_computed_tokens():
    pool, swap = KVPool(8, 4), SwapSpace(8, 4)
    request = running(pool, 11)
    blocks = list(request.block_ids)
    swap.swap_out(request, pool)
    pool.release(request)
    out = copies(swap)
    assert list(out.values()) == blocks, "10 tokens in 3 blocks of 4"
    assert swap.num_resumable(request, 0) == 10
    assert swap.swap_in(request, 0) == list(out)
    assert (swap.num_used, swap.num_swapped_out, swap.num_swapped_in) == (0, 3, 3)


def test_blocks_found_in_the_prefix_cache_are_not_copied_in():
    pool, swap = KVPool(8, 4), SwapSpace(8, 4)
    request = running(pool, 11)
    swap.swap_out(request, pool)
    host = list(copies(swap))
    assert swap.num_resumable(request, 2) == 10
    assert swap.swap_in(request, 2) == host[2:]


def test_shared_blocks_are_not_copied_and_count_while_they_are_cached():
    pool, swap = KVPool(8, 4), SwapSpace(8, 4)
    first = running(pool, 11)
    second = running(pool, 11)
    assert second.block_ids[:2] == first.block_ids[:2]
    swap.swap_out(second, pool)
    assert list(copies(swap).values()) == second.block_ids[2:]
    assert swap.num_resumable(second, 2) == 10
    assert swap.num_resumable(second, 1) == 4, "blocks after the gap are useless"
    assert swap.swap_in(second, 1) == []
    assert swap.num_used == 0


def test_blocks_that_do_not_fit_the_host_are_recomputed():
    pool, swap = KVPool(8, 4), SwapSpace(2, 4)
    request = running(pool, 11)
    swap.swap_out(request, pool)
    assert list(copies(swap).values()) == request.block_ids[:2]
    assert swap.num_resumable(request, 0) == 8
    other = running(pool, 11, token=2)
    swap.swap_out(other, pool)
    assert copies(swap) == {}
    assert swap.num_resumable(other, 0) == 0


def test_copies_wait_for_a_step_with_rows():
    pool, swap = KVPool(8, 4), SwapSpace(8, 4)
    swap.swap_out(running(pool, 11), pool)
    empty = SchedulerOutput()
    swap.send(empty)
    assert not empty.swap_out
    assert len(copies(swap)) == 3
    assert copies(swap) == {}, "they are sent once"


def test_a_step_does_not_overwrite_host_blocks_that_it_copies_in():
    """An urgent request can resume in the same step that preempts another one for it."""
    pool, swap = KVPool(12, 4), SwapSpace(3, 4)
    back, victim = running(pool, 11), running(pool, 11, token=2)
    swap.swap_out(back, pool)
    pool.release(back)
    copies(swap)
    assert len(swap.swap_in(back, 0)) == 3
    swap.swap_out(victim, pool)
    assert copies(swap) == {}, "the host has no other block in this step"
    swap.swap_out(victim, pool)
    assert len(copies(swap)) == 3, "and has them back in the next one"


def observed(seconds_per_block: float, seconds_per_token: float) -> SwapSpace:
    """A swap space in mode "auto" that has observed prompts at this rate."""
    swap = SwapSpace(100, 4, seconds_per_block, LearnedRecomputeCost())
    for count in (10, 40, 80, 20, 60) * 8:
        out = SchedulerOutput(slots=[0], num_scheduled_tokens=[count], num_computed_tokens=[0])
        swap.step_done(done_step(out, 0.001 + count * seconds_per_token))
    return swap


@pytest.mark.parametrize(("seconds_per_block", "swaps"), [(0.003, True), (0.005, False)])
def test_the_cheaper_of_swap_and_recompute_is_chosen(seconds_per_block, swaps):
    """A block of 4 tokens at 1 ms each: 4 ms to compute, 3 or 5 to copy out and in."""
    pool, swap = KVPool(8, 4), observed(seconds_per_block, 0.001)
    swap.swap_out(running(pool, 13), pool)
    assert bool(copies(swap)) is swaps


def test_nothing_is_swapped_before_the_cost_of_prompts_is_known():
    pool, swap = KVPool(8, 4), SwapSpace(8, 4, 1e-9, LearnedRecomputeCost())
    swap.swap_out(running(pool, 11), pool)
    assert copies(swap) == {}


def test_steps_with_copies_are_not_fitted():
    swap = SwapSpace(8, 4, 0.001, LearnedRecomputeCost())
    out = SchedulerOutput(slots=[0], num_scheduled_tokens=[50], num_computed_tokens=[0])
    out.swap_in = {1: 1}
    swap.step_done(done_step(out, 1.0))
    pool = KVPool(8, 4)
    swap.swap_out(running(pool, 11), pool)
    assert copies(swap) == {}


def test_the_cost_of_recompute_includes_attention():
    cost = StepCost(per_prefill_token=1.0, per_attention_pair=0.5)
    assert cost.recompute_seconds(0, 4) == 4 + 0.5 * (1 + 2 + 3 + 4)
    assert cost.recompute_seconds(2, 4) == 2 + 0.5 * (3 + 4)


def squeezed(**options):
    info = Info(num_blocks=16, num_host_blocks=options.pop("num_host_blocks", 32))
    return make_core(info, block_size=4, swap_space="1MiB", preemption_mode="swap", **options)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_swap_computes_no_token_twice(caching, overlap):
    core = squeezed(enable_prefix_caching=caching, async_scheduling=overlap)
    computed, execute = [], core.runner.execute

    def counting(out, prepared):
        computed.extend(out.num_scheduled_tokens)
        return execute(out, prepared)

    core.runner.execute = counting
    params = {i: add(core, i, [i] * 20, max_tokens=30, ignore_eos=True) for i in range(1, 4)}
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert core.scheduler.num_preempted_total >= 2
    assert core.scheduler.swap.num_swapped_in > 0
    for i in range(1, 4):
        assert outputs[i, 0] == expected_output([i] * 20, params[i], core.info)[0]
    assert sum(computed) == 3 * (20 + 30 - 1), "the last token of each is never computed"


def test_a_request_with_prompt_logprobs_is_swapped_like_any_other():
    core = squeezed()
    add(core, 1, [1] * 20, max_tokens=40, ignore_eos=True)
    add(core, 2, [2] * 20, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    run_until_idle(core, {}, {})
    assert core.scheduler.swap.num_swapped_in > 0


def test_aborting_a_swapped_request_frees_its_host_blocks():
    core = squeezed()
    add(core, 1, [1] * 20, max_tokens=40, ignore_eos=True)
    add(core, 2, [2] * 20, max_tokens=40, ignore_eos=True)
    outputs, reasons = {}, {}
    while not core.scheduler.swap.num_used:
        collect(core, outputs, reasons)
    core.abort(2)
    assert core.scheduler.swap.num_used == 0
    check_core(core)
    run_until_idle(core, outputs, reasons)
    assert set(reasons) == {(1, 0)}


def test_statistics_count_swaps():
    core = squeezed(enable_prefix_caching=False)
    add(core, 1, [1] * 20, max_tokens=40, ignore_eos=True)
    add(core, 2, [2] * 20, max_tokens=40, ignore_eos=True)
    peak = 0
    while core.has_work:
        stats = core.step().stats
        peak = max(peak, stats.host_blocks_used)
    assert peak > 0
    assert stats.swapped_out_total == stats.swapped_in_total == core.scheduler.swap.num_swapped_out >= peak
    assert stats.host_blocks_used == 0


def test_recompute_mode_has_no_host_blocks():
    core = make_core(
        Info(num_blocks=16, num_host_blocks=8), block_size=4, swap_space="1MiB", preemption_mode="recompute"
    )
    assert core.scheduler.swap.num_blocks == 0


def test_integrity_notices_a_lost_host_block():
    pool, swap = KVPool(8, 4), SwapSpace(8, 4)
    request = running(pool, 11)
    swap.swap_out(request, pool)
    swap.check_integrity([request])
    with pytest.raises(AssertionError, match="does not wait"):
        swap.check_integrity([])
    swap._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        swap.check_integrity([request])
