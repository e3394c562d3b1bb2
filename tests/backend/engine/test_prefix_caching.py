"""Prefix caching: which requests share blocks and when; a prefix is computed once."""

from __future__ import annotations

import pytest
from engine_rig import Info, collect, expected_output, make_core, run_until_idle
from slots import SlotOwners

from inflight.engine.core import EngineCore
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import AddRequest
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams

PREFIX = list(range(1, 33))  # 8 blocks of 4
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=6, ignore_eos=True)


def add(core: EngineCore, request_id: int, prompt: list[int], params: SamplingParams = PARAMS, **fields) -> None:
    assert core.add_request(AddRequest(request_id, prompt, params, **fields)) is None


def counted(core: EngineCore) -> list[dict[int, int]]:
    """For each step, request id -> tokens computed; grows as the core runs."""
    steps: list[dict[int, int]] = []
    execute, slots = core.runner.execute, SlotOwners()

    def counting(out, prepared):
        steps.append(dict(zip(slots.see(out).request_ids, out.num_scheduled_tokens)))
        return execute(out, prepared)

    core.runner.execute = counting
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_arrive_together_compute_their_common_prefix_once(overlap):
    core = make_core(Info(), block_size=4, async_scheduling=overlap)
    steps = counted(core)
    for request_id in range(5):
        add(core, request_id, [*PREFIX, 40 + request_id, 7])
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert steps[0] == {0: 34, 1: 2, 2: 2, 3: 2, 4: 2}
    for request_id in range(5):
        assert outputs[request_id, 0] == expected_output([*PREFIX, 40 + request_id, 7], PARAMS, core.info)[0]
    assert core.pool.num_prefix_hits == 4 * 32
    assert core.pool.num_prefix_queries == 5 * 34


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_is_shared_while_it_is_being_computed(overlap):
    """The first request takes all of the budget; the one that arrives meanwhile computes only its tail."""
    core = make_core(Info(), block_size=4, max_num_batched_tokens=16, async_scheduling=overlap)
    steps = counted(core)
    outputs, reasons = {}, {}
    add(core, 0, [*PREFIX, 40, 7])
    collect(core, outputs, reasons)
    add(core, 1, [*PREFIX, 41, 7])
    run_until_idle(core, outputs, reasons)
    assert steps[:3] == [{0: 16}, {0: 16}, {0: 2, 1: 2}]
    assert outputs[1, 0] == expected_output([*PREFIX, 41, 7], PARAMS, core.info)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_is_cached_once_its_request_has_ended(overlap):
    """The next turn of a conversation: prompt, answer and a new question."""
    core = make_core(Info(), block_size=4, async_scheduling=overlap)
    outputs, reasons = {}, {}
    add(core, 0, PREFIX, SamplingParams(temperature=0.0, seed=0, max_tokens=13, ignore_eos=True))
    run_until_idle(core, outputs, reasons)
    steps = counted(core)
    turn = [*PREFIX, *outputs[0, 0], 7]
    add(core, 1, turn)
    run_until_idle(core, outputs, reasons)
    assert steps[0] == {1: 2}, "44 of 46 tokens: the answer's last token has no KV"
    assert outputs[1, 0] == expected_output(turn, PARAMS, core.info)[0]


def test_a_preempted_request_finds_its_computed_blocks():
    core = make_core(Info(num_blocks=16), block_size=4)
    outputs, reasons = {}, {}
    for request_id in (0, 1):
        add(core, request_id, [request_id] * 3, SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True))
    while not core.scheduler.num_preempted_total:
        collect(core, outputs, reasons)
    (victim,) = core.scheduler.waiting
    computed = victim.num_tokens - 1
    assert len(core.pool.find_prefix(victim)) == computed // 4 - 1, "all but the block that it was preempted for"
    run_until_idle(core, outputs, reasons)
    assert all(len(outputs[request_id, 0]) == 40 for request_id in (0, 1))


def test_a_request_aborted_during_prefill_leaves_an_intact_prefix():
    core = make_core(Info(), block_size=4, max_num_batched_tokens=16, async_scheduling=True)
    outputs, reasons = {}, {}
    add(core, 0, [*PREFIX, 40, 7])
    collect(core, outputs, reasons)  # one step has run, the next one is launched
    core.abort(0)
    add(core, 1, [*PREFIX, 41, 7])
    run_until_idle(core, outputs, reasons)
    assert outputs[1, 0] == expected_output([*PREFIX, 41, 7], PARAMS, core.info)[0]
    assert core.pool.num_prefix_hits == 32


def test_tenants_and_salts_share_no_blocks():
    core = make_core(Info(), block_size=4)
    steps = counted(core)
    groups = [{}, {"tenant": "a"}, {"tenant": "b"}, {"cache_salt": "a"}, {"tenant": "a", "cache_salt": "a"}]
    for request_id, group in enumerate(groups):
        add(core, request_id, [*PREFIX, 7], **group)
    for request_id, group in enumerate(groups):
        add(core, 10 + request_id, [*PREFIX, 8], **group)
    run_until_idle(core, {}, {})
    assert steps[0] == {**dict.fromkeys(range(5), 33), **{10 + i: 1 for i in range(5)}}


def test_tenant_and_salt_are_distinct():
    pool = KVPool(16, 4)
    first = Request(1, [1] * 9, PARAMS, tenant="ab", cache_salts=("c",))
    pool.admit(first, [])
    pool.extend(first, 9)
    pool.publish(first, 9)
    assert pool.find_prefix(Request(2, [1] * 9, PARAMS, tenant="a", cache_salts=("bc",))) == []
    assert pool.find_prefix(Request(2, [1] * 9, PARAMS, tenant="ab", cache_salts=("c",))) == first.block_ids[:2]


def test_prompt_logprobs_take_hits_only_for_delivered_entries():
    pool = KVPool(16, 4)
    tokens = list(range(17))
    first = Request(1, tokens, PARAMS)
    pool.admit(first, [])
    pool.extend(first, 17)
    pool.publish(first, 17)
    asks = Request(2, tokens, SamplingParams(prompt_logprobs=0))
    assert pool.find_prefix(asks) == []
    asks.num_prompt_logprobs = 9  # preempted after 8 tokens, whose logits predict tokens 1 to 8
    assert pool.find_prefix(asks) == first.block_ids[:2]
    asks.num_prompt_logprobs = 17
    assert pool.find_prefix(asks) == first.block_ids[:4]


def test_it_can_be_turned_off():
    core = make_core(Info(), block_size=4, enable_prefix_caching=False)
    steps = counted(core)
    for request_id in range(3):
        add(core, request_id, [*PREFIX, 7])
    run_until_idle(core, {}, {})
    assert steps[0] == {0: 33, 1: 33, 2: 33}
    assert core.pool.num_prefix_queries == 0
