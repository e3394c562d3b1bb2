"""Steps are plain data: another process receives exactly the data that was sent."""

from __future__ import annotations

import msgspec
import pytest
from drafters import HashDrafter
from engine_rig import Info, add, make_core

from inflight.engine.logprobs import Logprobs
from inflight.engine.step import NewRow, SchedulerOutput, StepOutput


def through_the_wire(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def test_a_step_with_everything_in_it_comes_back_equal():
    core = make_core(
        Info(num_blocks=16, num_host_blocks=64), block_size=4, enable_prefix_caching=False, max_num_seqs=3,
        preemption_mode="swap", swap_space="1MiB",
    )  # fmt: skip
    core.scheduler.policies.drafter = HashDrafter("wrong", 9)
    for i in range(4):
        add(core, i, [i] * 20, max_tokens=40, ignore_eos=True, logit_bias={3: 0.5}, stop_token_ids=[7])
    seen: set[str] = set()
    for _ in range(60):
        out = core.scheduler.schedule()
        assert through_the_wire(out) == out
        seen |= {name for name in SchedulerOutput.__struct_fields__ if getattr(out, name)}
        core.scheduler.update(out, core.runner.launch(out))
    assert seen == set(SchedulerOutput.__struct_fields__), "every field had something in it"


def test_a_result_with_everything_in_it_comes_back_equal():
    entry = [(7, -0.25, 1), (9, -1.5, 2)]
    one, two = Logprobs.of([entry]), Logprobs.of([entry, entry])
    step = StepOutput(
        [3, -1, -1], {1: [4, 5]}, {0: one, 1: two}, {2: one}, 1.5, 1.75, 2.0, "why", {2: "why"}, {1: b"vector"}
    )
    assert all(getattr(step, name) for name in StepOutput.__struct_fields__)
    assert through_the_wire(step) == step


@pytest.mark.parametrize("kind", [NewRow, SchedulerOutput, StepOutput])
def test_a_step_holds_no_request(kind):
    assert "Request" not in {part for hint in kind.__annotations__.values() for part in str(hint).split(".")}
