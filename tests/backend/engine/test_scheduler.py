"""Examples of scheduler behaviour."""

from __future__ import annotations

import re

import pytest
from engine_rig import Info, add, collect, expected_output, make_core, run_until_idle
from slots import SlotOwners

from inflight.engine.deltas import SequenceDelta, StepStats, TokenColumns
from inflight.engine.integrity import check_core, check_scheduler
from inflight.engine.logprobs import Logprobs
from inflight.engine.messages import AddRequest, StepMessage, decode_to_frontend, encode
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import StepOutput


def scheduled(core):
    """(request id, tokens) pairs of the next batch, executed."""
    out = core.scheduler.schedule()
    step = core.runner.execute(out, None)
    slots = vars(core).setdefault("slots", SlotOwners())
    pairs = list(zip(slots.see(out).request_ids, out.num_scheduled_tokens))
    core.scheduler.update(out, step)
    check_scheduler(core.scheduler)
    return pairs


def test_decodes_and_prefill_chunks_share_one_budget():
    core = make_core(Info(), max_num_batched_tokens=8, block_size=4, short_prompt_share=0)
    add(core, 1, [1, 2, 3], max_tokens=20, ignore_eos=True)
    assert scheduled(core) == [(1, 3)]
    add(core, 2, list(range(1, 31)), max_tokens=20, ignore_eos=True)
    assert scheduled(core) == [(1, 1), (2, 7)]
    assert scheduled(core) == [(1, 1), (2, 7)]
    add(core, 3, [4, 5, 6], max_tokens=20, ignore_eos=True)
    assert scheduled(core) == [(1, 1), (2, 7)]
    assert scheduled(core) == [(1, 1), (2, 7)]
    assert scheduled(core) == [(1, 1), (2, 2), (3, 3)]
    assert scheduled(core) == [(1, 1), (2, 1), (3, 1)]


def test_a_request_joins_and_leaves_between_steps():
    core = make_core(Info(), max_num_seqs=2)
    add(core, 1, [1], max_tokens=2, ignore_eos=True)
    add(core, 2, [2], max_tokens=4, ignore_eos=True)
    add(core, 3, [3], max_tokens=2, ignore_eos=True)
    assert [r for r, _ in scheduled(core)] == [1, 2]
    assert [r for r, _ in scheduled(core)] == [1, 2]
    assert [r for r, _ in scheduled(core)] == [2, 3], "3 takes the slot of 1, and 2 continues"
    assert [r for r, _ in scheduled(core)] == [2, 3]
    assert not core.has_work


def test_the_latest_admitted_is_preempted_and_resumes_with_its_tokens():
    info = Info(num_blocks=16)
    core = make_core(info, block_size=4, enable_prefix_caching=False)
    first = add(core, 1, [1] * 20, max_tokens=40, ignore_eos=True)
    second = add(core, 2, [2] * 20, max_tokens=40, ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert core.scheduler.num_preempted_total >= 1
    assert outputs[1, 0] == expected_output([1] * 20, first, info)[0]
    assert outputs[2, 0] == expected_output([2] * 20, second, info)[0]


def test_nothing_is_admitted_in_the_step_that_preempts():
    core = make_core(Info(num_blocks=16), block_size=4, enable_prefix_caching=False)
    add(core, 1, [1] * 30, max_tokens=30, ignore_eos=True)
    add(core, 2, [2] * 22, max_tokens=30, ignore_eos=True)
    add(core, 3, [3], max_tokens=1)
    while True:
        out = core.scheduler.schedule()
        if out.preempted:
            assert not out.new_rows
            return
        core.scheduler.update(out, core.runner.execute(out, None))


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_of_one_request_share_the_prompts_blocks(caching):
    core = make_core(Info(), block_size=4, enable_prefix_caching=caching)
    prompt = list(range(1, 18))  # 4 full blocks and one token
    add(core, 1, prompt, n=4, max_tokens=8, ignore_eos=True)
    outputs, reasons = {}, {}
    collect(core, outputs, reasons)
    collect(core, outputs, reasons)
    tables = [request.block_ids for request in core.scheduler.running]
    assert len(tables) == 4
    assert all(table[:4] == tables[0][:4] for table in tables), "the full blocks of the prompt are shared"
    assert len({table[4] for table in tables}) == 4, "the block that each writes to is its own"
    run_until_idle(core, outputs, reasons)
    assert len(reasons) == 4


def test_an_equal_prefix_is_computed_once_unless_the_salt_differs():
    core = make_core(Info(), block_size=4)
    prompt = list(range(1, 14))
    outputs, reasons = {}, {}
    add(core, 1, prompt, max_tokens=2, ignore_eos=True)
    run_until_idle(core, outputs, reasons)
    add(core, 2, prompt, max_tokens=2, ignore_eos=True)
    assert scheduled(core) == [(2, 1)], "12 of 13 tokens are cached"
    run_until_idle(core, outputs, reasons)
    salted = AddRequest(3, prompt, SamplingParams(max_tokens=2, seed=0), cache_salt="someone else")
    assert core.add_request(salted) is None
    assert scheduled(core) == [(3, 13)]


def test_prompt_logprobs_take_no_prefix_hits():
    core = make_core(Info(), block_size=4)
    prompt = list(range(1, 14))
    outputs, reasons = {}, {}
    add(core, 1, prompt, max_tokens=2, ignore_eos=True)
    run_until_idle(core, outputs, reasons)
    add(core, 2, prompt, max_tokens=1, prompt_logprobs=0)
    assert scheduled(core) == [(2, 13)]


def test_max_model_len_ends_a_request_by_length():
    info = Info(max_model_len=24)
    core = make_core(info)
    add(core, 1, [1] * 20, max_tokens=100, ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert len(outputs[1, 0]) == 4
    assert reasons[1, 0] == "length"


def test_stop_token_ids_and_eos():
    info = Info()
    core = make_core(info)
    free = add(core, 1, [3, 1, 4], max_tokens=40, ignore_eos=True)
    tokens = expected_output([3, 1, 4], free, info)[0]
    add(core, 2, [3, 1, 4], max_tokens=40, stop_token_ids=[tokens[5]], ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert outputs[1, 0] == tokens
    assert outputs[2, 0] == tokens[: tokens.index(tokens[5]) + 1]
    assert reasons == {(1, 0): "length", (2, 0): "stop"}


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, "the prompt has 64 tokens: at most 63 fit max_model_len=64"),
        ([1, 50], {}, r"token id 50 is not in the vocabulary \[0, 49\]"),
        ([1, -1], {}, "token id -1"),
        ([1], {"top_p": 0.0}, r"top_p=0.0 is out of range: must be in \(0.0, 1.0\]"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"min_tokens": 5, "max_tokens": 2}, "min_tokens=5 is more than max_tokens=2"),
        ([1], {"logit_bias": {77: 1.0}}, "logit_bias: token id 77"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids: token id 99"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(prompt, params, message):
    core = make_core(Info())
    failure = core.add_request(AddRequest(1, prompt, SamplingParams(**params)))
    assert failure.code == "INVALID_ARG"
    assert re.search(message, failure.message)
    assert not core.has_work
    check_core(core)


def test_a_full_queue_refuses_requests_until_it_drains():
    core = make_core(Info(), max_num_seqs=1, max_queue_size=2)
    for request_id in range(3):  # one can run, two wait
        add(core, request_id, [1], max_tokens=2, ignore_eos=True)
    refused = core.add_request(AddRequest(9, [1], SamplingParams()))
    assert refused.code == "UNAVAILABLE"
    assert "max_queue_size=2" in refused.message
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    add(core, 10, [1], max_tokens=1)
    run_until_idle(core, outputs, reasons)
    assert len(reasons) == 4


def test_abort_frees_blocks_immediately_in_every_state():
    core = make_core(Info(), max_num_seqs=1, block_size=4)
    add(core, 1, [1] * 10, max_tokens=30, ignore_eos=True, n=2)
    add(core, 2, [2] * 10, max_tokens=30, ignore_eos=True)
    outputs, reasons = {}, {}
    collect(core, outputs, reasons)
    core.abort(2)  # waiting
    core.abort(1, 0)  # running; its sibling waits
    check_core(core)
    run_until_idle(core, outputs, reasons)
    assert set(reasons) == {(1, 1)}
    core.abort(1)  # ended
    core.abort(77)  # never seen
    check_core(core)


def test_a_full_delta_is_made_only_for_more_than_a_token():
    core = make_core(Info())
    scheduler, slots = core.scheduler, SlotOwners()
    add(core, 1, [1, 2], max_tokens=3, ignore_eos=True)
    add(core, 2, [3, 4], max_tokens=3, ignore_eos=True, logprobs=0)
    add(core, 3, [5, 6], max_tokens=3, n=2, stop_token_ids=[9])

    def step(*tokens):
        out = scheduler.schedule()
        ids = slots.see(out).request_ids
        entries = {row: Logprobs.of([[(token, -0.5, 1)]]) for row, token in enumerate(tokens) if ids[row] == 2}
        updated, columns = scheduler.update(out, StepOutput(list(tokens), logprobs=entries))
        deltas = [
            (delta.request_id, delta.index, delta.token_ids, delta.finish_reason, delta.logprobs) for delta in updated
        ]
        return deltas, list(zip(columns.request_ids, columns.indices, columns.token_ids))

    logprobs = Logprobs.of([[(7, -0.5, 1)]])
    first = [(1, 0, [7], None, None), (2, 0, [7], None, logprobs), (3, 0, [7], None, None)]
    assert step(7, 7, 7) == (first, [])
    # The second sequence of request 3 has its first token when the others have their second.
    assert step(7, 7, 7, 7) == ([(2, 0, [7], None, logprobs), (3, 1, [7], None, None)], [(1, 0, 7), (3, 0, 7)])
    last = [(1, 0, [7], "length", None), (2, 0, [7], "length", logprobs), (3, 0, [7], "length", None)]
    assert step(7, 7, 7, 9) == ([*last, (3, 1, [9], "stop", None)], [])
    assert not core.scheduler.has_work


def test_a_request_that_ended_while_the_step_ran_gets_no_delta():
    core = make_core(Info())
    for request_id in (1, 2):
        add(core, request_id, [1, 2], max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    out = core.scheduler.schedule()
    core.abort(2)
    entries = {row: Logprobs.of([[(7, -0.5, 1)]]) for row in (0, 1)}
    prompts = {row: Logprobs.of([[(2, -0.5, 1)]]) for row in (0, 1)}
    deltas, columns = core.scheduler.update(out, StepOutput([7, 7], logprobs=entries, prompt_logprobs=prompts))
    assert [(delta.request_id, delta.logprobs, delta.prompt_logprobs) for delta in deltas] == [
        (1, entries[0], Logprobs.of([[], *prompts[0]]))
    ]
    assert columns.token_ids == []


def test_a_sequence_that_is_aborted_before_the_prompt_is_computed_does_not_run():
    core = make_core(Info(), max_num_seqs=4)
    add(core, 1, [1] * 10, n=3, max_tokens=5, ignore_eos=True)
    core.abort(1, 1)
    outputs: dict[tuple[int, int], list[int]] = {}
    run_until_idle(core, outputs, {})
    assert sorted(outputs) == [(1, 0), (1, 2)]


def test_columns_are_deltas_on_the_other_side_of_the_pipe():
    stats = StepStats(*[1] * 10, step_seconds=0.5)
    last = SequenceDelta(3, 0, [9], "stop", 9)
    message = decode_to_frontend(encode(StepMessage([last], stats, TokenColumns([1, 2], [0, 5], [7, 8]))))
    assert message.stats == stats
    assert message.deltas == [last, SequenceDelta(1, 0, [7]), SequenceDelta(2, 5, [8])]
    assert decode_to_frontend(encode(StepMessage([], stats))).deltas == []
