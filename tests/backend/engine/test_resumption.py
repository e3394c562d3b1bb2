"""A request can begin with output: it continues as if it had generated that output itself."""

from __future__ import annotations

import re

import pytest
from engine_rig import Info, add, expected_output, make_core, run_until_idle

from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams

PROMPT = [3, 1, 4]


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("overlap", [False, True])
def test_it_continues_where_it_was_cut(cut, overlap):
    core = make_core(Info(), async_scheduling=overlap, block_size=4)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
    whole, reason = expected_output(PROMPT, params, core.info)
    add(core, 1, PROMPT, {"output_token_ids": [whole[:cut]]}, max_tokens=12, ignore_eos=True)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert (outputs[1, 0], reasons[1, 0]) == (whole[cut:], reason)


def test_the_runner_is_told_where_the_output_starts():
    core = make_core(Info())
    add(core, 1, PROMPT, {"output_token_ids": [[7, 8]]}, max_tokens=12, ignore_eos=True)
    out = core.scheduler.schedule()
    (row,) = out.new_rows
    assert row.num_prompt_tokens == 3, "penalties and min_tokens count from here"
    assert memoryview(row.token_ids).cast("i").tolist() == [*PROMPT, 7, 8]
    assert (out.num_computed_tokens, out.num_scheduled_tokens) == ([0], [5])


def test_each_sequence_continues_and_ended_ones_do_not_run():
    core = make_core(Info(), block_size=4)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=10, ignore_eos=True, n=4)
    whole, _ = expected_output(PROMPT, params, core.info)
    resumed = {"output_token_ids": [None, whole[:3], [], whole[:9]]}
    add(core, 1, PROMPT, resumed, max_tokens=10, ignore_eos=True, n=4)
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert outputs == {(1, 1): whole[3:], (1, 2): whole, (1, 3): whole[9:]}
    assert set(reasons) == set(outputs)


def test_the_first_delta_of_a_resumed_request_is_full():
    core = make_core(Info(), block_size=4)
    add(core, 1, list(range(1, 14)), max_tokens=3, ignore_eos=True)
    run_until_idle(core, {}, {})
    add(core, 2, list(range(1, 14)), {"output_token_ids": [[5]]}, max_tokens=6, ignore_eos=True)
    message = core.step()
    (delta,) = message.full_deltas
    assert delta.num_cached_tokens == 12, "prompt tokens only, as for any request"
    assert not message.tokens.token_ids


@pytest.mark.parametrize(
    ("outputs", "n", "message"),
    [
        ([[1]], 2, "has 1 entries: give one for each of the n=2"),
        ([[1], [1], [1]], 2, "has 3 entries"),
        ([None], 1, "every sequence has ended"),
        ([[1] * 10], 1, "has 10 tokens already.*allow 10"),
        ([[1] * 70], 1, "has 70 tokens already"),
        ([[50]], 1, r"token id 50 is not in the vocabulary \[0, 49\]"),
        ([[-1]], 1, "token id -1 is not in the vocabulary"),
        ([[1, 0]], 1, "ended with stop token 0"),
        ([[1, 9]], 1, "ended with stop token 9"),
    ],
)
def test_output_that_cannot_be_continued_is_refused(outputs, n, message):
    core = make_core(Info())
    params = SamplingParams(max_tokens=10, n=n, stop_token_ids=[9])
    failure = core.add_request(AddRequest(1, PROMPT, params, output_token_ids=outputs))
    assert failure is not None and failure.code == "INVALID_ARG"
    assert re.search(message, failure.message), failure.message
    assert not core.has_work
